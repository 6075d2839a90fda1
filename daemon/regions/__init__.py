"""Package that keeps the names, owners and quotas of clients' shared memory, and knows when it is to be unregistered."""
