"""Package for the Unix socket on which local clients ask for lanes to the workers and pass shared memory to the daemon."""
