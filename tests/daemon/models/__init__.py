"""Tests of daemon/models/."""
