"""Tests of daemon/submit/."""
