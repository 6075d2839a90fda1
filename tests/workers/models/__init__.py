"""Models and the ways they are run."""
