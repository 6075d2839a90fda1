"""Requests in flight: room for their tensors, the choice of a worker, sending, answers, and a worker's death."""
