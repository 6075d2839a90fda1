"""The private interfaces of JAX that a worker uses, listed in one place, each with what is so without it."""
