"""Clients' memory on the worker's side: mappings, leases, and which objects may be used and how."""
