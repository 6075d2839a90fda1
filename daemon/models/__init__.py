"""This room knows which models are wanted and what state they are in, over all workers."""
