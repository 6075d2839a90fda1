"""Processes that compile programs for a worker: a compiler that crashes fails one model's load, and not the worker."""
