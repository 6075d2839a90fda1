"""Tests of the example and benchmark models, called directly; tests/protocol calls them through a daemon."""
