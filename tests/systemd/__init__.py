"""Tests of the service files in systemd/."""
