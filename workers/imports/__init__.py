"""Keeps the code of models in one process apart: each imports its own modules first, and changes settings only for itself."""
