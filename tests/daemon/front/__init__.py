"""Tests of daemon/front/."""
