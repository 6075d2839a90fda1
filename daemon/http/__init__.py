"""The HTTP front: a process that parses clients' requests, places their tensors, submits them to workers, and encodes answers."""
