"""Fuzzing, guided by coverage, of all that reads foreign bytes, in C and in Python: ``make fuzz`` (docs/development: tests)."""
