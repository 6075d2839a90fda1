"""Package for the clients' Unix socket: who the clients are, their lanes to the workers, and memory that they hand over."""
