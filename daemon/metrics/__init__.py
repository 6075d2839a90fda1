"""Package that serves the daemon's metrics to Prometheus on a port of its own; other packages count what it shows."""
