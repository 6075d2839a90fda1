"""Compiled programs: makes, stores, chooses and runs them."""
