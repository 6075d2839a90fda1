"""Bringing models into memory: what is declared, created, compiled and run once, until it can serve."""
