"""Queues, and planners that decide which requests run together and when. Pure: no jax, no sockets, no clocks."""
