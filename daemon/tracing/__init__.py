"""Package that keeps the trace settings, and sends traces to a collector."""
