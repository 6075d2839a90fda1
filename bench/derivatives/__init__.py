"""Measures derivatives of served models beside their values, and beside ``tesseract-jax`` with a server of its own."""
