"""Clients on the same host over lanes, beside gRPC and HTTP with system regions, and beside the lower limits."""
