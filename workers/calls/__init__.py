"""What a model's code may ask of the worker: requests to other models, loading them, metrics, spans and processes."""
