"""Tests of tensord/protocol/, and the program that compiles its modules."""
