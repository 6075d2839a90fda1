"""Measures clients on the same host over lanes, beside gRPC and HTTP with system regions, and beside lower limits."""
