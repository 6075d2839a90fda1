"""Loads models: reads their declarations, creates the models, compiles their programs and runs them once, before they serve."""
