"""The way of a request through the worker: validated, queued, run, answered."""
