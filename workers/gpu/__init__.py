"""Runs programs on a GPU: gathers inputs in its memory, fetches outputs or delivers them to their places."""
