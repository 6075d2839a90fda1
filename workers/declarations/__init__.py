"""Declarations of models, in their folders and configurations: reads, checks and writes them."""
