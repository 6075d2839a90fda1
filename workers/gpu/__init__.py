"""Runs programs on a GPU. Copies their inputs to the GPU, and their outputs to the places where they are needed."""
