"""Runs compiled programs on a GPU, and copies inputs to the GPU and outputs from the GPU."""
