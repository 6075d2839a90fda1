"""Package for what a model's code asks of its worker: calls and loads of other models, metrics, spans and processes."""
