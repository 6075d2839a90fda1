"""Requests inside the worker: what they are, of which form, who sent them, what came of them."""
