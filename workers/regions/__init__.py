"""Shared memory of clients as a worker uses it: what may be used and how, how it is mapped, and which requests use it."""
