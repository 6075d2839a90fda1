"""Tests of workers/declarations/."""
