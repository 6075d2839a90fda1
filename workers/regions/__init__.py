"""Clients' memory from the worker's side: mappings, leases, whose objects are used and how."""
