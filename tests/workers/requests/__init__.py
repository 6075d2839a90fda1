"""Tests of workers/requests/."""
