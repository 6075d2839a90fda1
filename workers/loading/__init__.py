"""Brings models into memory: reads declarations, creates, compiles and runs them once, until they can serve."""
