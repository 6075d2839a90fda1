"""Clients' memory as a worker uses it: mappings, leases, and which objects may be used and how."""
