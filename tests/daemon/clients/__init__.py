"""Tests of daemon/clients/."""
