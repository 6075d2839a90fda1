"""Which models are wanted and where they stand, over all workers."""
