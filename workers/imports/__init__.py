"""Keeps the Python modules of the models in one process apart, and also the JAX settings that each model's code makes."""
