"""Requests that models make to other models, from whichever thread, and what they wait for."""
