"""Benchmarks that measure what the documentation claims about speed and memory: ``make bench``."""
