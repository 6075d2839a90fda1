"""This room serves the daemon's metrics to Prometheus on a port of its own; they are counted elsewhere."""
