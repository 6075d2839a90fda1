"""What Prometheus reads of the daemon: counted elsewhere, gathered when somebody asks, served on a port of its own."""
