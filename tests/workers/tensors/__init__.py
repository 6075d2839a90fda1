"""Tests of workers/tensors/."""
