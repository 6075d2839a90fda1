"""Runs programs on a processor (CPU): in host memory, small programs with one thread."""
