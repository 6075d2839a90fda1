"""Tests of the instruments: a benchmark that measures wrongly is worse than none."""
