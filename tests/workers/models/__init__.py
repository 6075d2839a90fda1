"""Tests of workers/models/."""
