"""What exists only where programs run on a processor: in the host's memory, some with one thread, and compiled elsewhere."""
