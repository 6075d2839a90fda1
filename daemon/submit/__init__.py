"""Handles a front's requests in flight: places tensors, chooses workers, sends, receives answers, copes with dead workers."""
