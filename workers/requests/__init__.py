"""Requests inside the worker: what they are, what they have in common, who sent them, what came of them."""
