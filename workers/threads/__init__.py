"""Threads beside the worker's loop, and how they speak to it."""
