"""Code that all processes of the daemon share, such as errors and shared memory. It imports no other package of tensord."""
