"""Tests of shm/."""
