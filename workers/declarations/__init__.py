"""Reads and checks what a model declares about itself in its configuration and in its files, such as model.py."""
