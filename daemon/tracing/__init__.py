"""Traces of requests: which are sampled, what is known of them, where they are written."""
