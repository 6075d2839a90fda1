"""Tests of the HTTP front."""
