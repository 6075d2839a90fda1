"""Package for a worker's regions: opens them, finds them by name, and says where outputs of requests are written."""
