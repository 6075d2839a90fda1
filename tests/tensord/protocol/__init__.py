"""Tests of tensord/protocol/, and the compiler of its modules."""
