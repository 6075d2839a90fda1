"""Models in memory: versions and their instances, how each kind runs, and their statistics."""
