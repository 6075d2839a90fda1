"""Tests of daemon/metrics."""
