"""This room keeps the names, owners and quotas of clients' memory, and knows when it is unregistered."""
