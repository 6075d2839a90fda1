"""Tests of daemon/tracing/."""
