"""Models in memory: versions and their instances, how each kind runs, and what is counted of it."""
