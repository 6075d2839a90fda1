"""Tests of workers/threads/."""
