"""Tests of the example and benchmark models, called directly; through the wire they are tested in tests/protocol."""
