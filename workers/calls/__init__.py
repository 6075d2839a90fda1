"""Serves what a model's code asks of its worker: requests to other models, loading them, metrics, spans and processes."""
