"""Measures the gateway for robots beside ``openpi-server``, which serves the same jitted function to the same clients."""
