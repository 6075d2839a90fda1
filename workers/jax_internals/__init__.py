"""What of JAX a worker uses though it is not public, listed in one place, and what is so without it."""
