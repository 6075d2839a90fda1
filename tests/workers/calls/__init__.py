"""Tests of what a model's code asks of its worker."""
