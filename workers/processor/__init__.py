"""Runs compiled programs on a CPU. Small programs can run with a single thread."""
