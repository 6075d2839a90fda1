"""Models in memory and the ways they are run."""
