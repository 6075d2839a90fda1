"""Tests of daemon/operator/."""
