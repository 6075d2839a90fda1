"""Compiles, stores, chooses and runs programs of models."""
