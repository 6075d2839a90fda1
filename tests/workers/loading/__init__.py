"""Tests of workers/loading/."""
