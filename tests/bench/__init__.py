"""Tests of the benchmarks: one that measures wrongly is worse than none."""
