"""Gives a model's code its own imports: its own modules first, then the environment."""
