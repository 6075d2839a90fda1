"""Package that keeps the names, owners and quotas of clients' regions, and unregisters regions when their owners end."""
