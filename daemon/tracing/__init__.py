"""Samples requests, and sends their traces to files and to a collector."""
