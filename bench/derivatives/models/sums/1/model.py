"""A number of 16 MiB, whose gradient has 16 MiB."""

import jax.numpy as jnp

inputs, outputs, derivatives = {"x": f"FP32[{1 << 22}]"}, {"y": "FP32[]"}, True


def create(path, config, device):
    """Returns the function to run and its parameters."""
    return (lambda params, inputs: {"y": jnp.sum(inputs["x"] * inputs["x"]) / 2}), {}
