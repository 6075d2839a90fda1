"""Tests of workers/regions/."""
