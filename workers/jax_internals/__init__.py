"""The private interfaces of JAX that a worker uses, listed in one place, each with its fallback."""
