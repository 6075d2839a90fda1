"""Gives each model's code its own imports (its own modules first, then the environment's) and its own process-wide settings."""
