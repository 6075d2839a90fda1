"""Tests of daemon/processes/."""
