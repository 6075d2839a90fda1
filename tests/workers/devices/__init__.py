"""Tests of workers/devices/."""
