"""Bringing models into memory."""
