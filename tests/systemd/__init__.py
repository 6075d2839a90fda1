"""Tests of the service files."""
