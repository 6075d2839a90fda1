"""The HTTP front: one process that parses requests, places tensors, submits, and serialises answers."""
