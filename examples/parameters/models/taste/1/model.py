"""Predicts how a customer rates an article: its 8 properties, weighted. Each customer has own weights (``customers.py``)."""

import jax.numpy as jnp

max_batch_size = 64
inputs = {"article": "FP32[8]"}
outputs = {"score": "FP32[1]"}


def create(path, config, device):
    """Returns the function and the weights for customers who have rated nothing."""

    def apply(params, inputs):
        return {"score": inputs["article"] @ params["weights"] + params["bias"]}

    return apply, {"weights": jnp.ones((8, 1)), "bias": jnp.zeros(1)}
