"""Tests of daemon/regions/."""
