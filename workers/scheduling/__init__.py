"""Pure deciders: queues and batch planners. No jax, no sockets, no clocks."""
