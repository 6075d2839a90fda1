"""Tests of workers/native/."""
