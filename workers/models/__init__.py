"""Loaded models: versions and their instances, how each kind of model runs, and statistics."""
