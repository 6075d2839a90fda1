"""Tests of daemon/fetching/."""
