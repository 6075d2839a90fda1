"""Serves a layer that all customers share, with a low-rank adapter for each: many customers' requests are one call.

``examples/parameters/adapters.py`` pushes adapters and asks for all of them at once.
"""

import jax
import jax.numpy as jnp

max_batch_size = 16
inputs = {"x": "FP32[64]"}
outputs = {"y": "FP32[64]"}
batch_sets = ("adapter",)  # what differs between parameter sets; the base is that of main
resident_sets = 64  # adapters side by side on the device

RANK = 4


def create(path, config, device):
    """Returns the function and its first parameters: a base, and an adapter that changes nothing."""

    def apply(stacked, inputs, index):
        x, adapter = inputs["x"], stacked["adapter"]
        down, up = adapter["down"][index], adapter["up"][index]  # of each row: [rows, 64, 4] and [rows, 4, 64]
        return {"y": x @ stacked["base"] + jnp.einsum("bi,bir,bro->bo", x, down, up)}

    base = jax.random.normal(jax.random.key(0), (64, 64)) / 8
    return apply, {"base": base, "adapter": {"down": jnp.zeros((64, RANK)), "up": jnp.zeros((RANK, 64))}}
