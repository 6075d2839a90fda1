"""Lists the private interfaces of JAX that a worker uses, and says what happens if JAX does not have one of them."""
