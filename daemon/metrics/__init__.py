"""Package that serves the daemon's metrics to Prometheus on a separate port; other packages count what it shows."""
