"""Tests of daemon/parameters/."""
