"""Separates the code of models in one process: each imports its own modules first, and changes settings only for itself."""
