"""Tests of workers/dispatch/."""
