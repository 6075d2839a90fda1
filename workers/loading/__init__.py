"""Loads models: reads their declarations, creates, compiles and runs them once, until they can serve."""
