"""Package for the clients' shared memory as a worker uses it: what may be registered, how it is mapped, what uses it."""
