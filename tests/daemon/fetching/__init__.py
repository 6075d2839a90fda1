"""Tests of daemon/fetch.py."""
