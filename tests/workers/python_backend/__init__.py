"""Tests of workers/python_backend/."""
