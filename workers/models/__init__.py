"""Loading models and running them: the jax and python back ends."""
