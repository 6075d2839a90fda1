"""Tests of workers/scheduling/: pure functions, tested by what they decide."""
