"""Clients' memory from the supervisor's side: names, owners, quotas, and when it ends."""
