"""Threads beside the worker's loop, and how they communicate with the loop."""
