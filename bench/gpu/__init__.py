"""Measures a host with a GPU: its driver, XLA on it and tensord on it; the results go to one JSON file and one page."""
