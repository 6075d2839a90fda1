"""Tests of workers/programs/."""
