"""A policy whose parameters are int8 and become floats in each call: sixteen rows cost little more than one."""

import jax
import jax.numpy as jnp

WIDTH, LAYERS = 2048, 2
inputs = {"image": "UINT8[96,96,3]", "state": "FP32[32]"}
outputs = {"actions": "FP32[16,8]"}
max_batch_size = 16


def create(path, config, device):
    """Returns the function to run and its parameters. The worker, and the peer, call it."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    params = {
        "into": jax.random.normal(keys[0], (32, WIDTH), jnp.float32),
        "layers": [jax.random.randint(key, (WIDTH, WIDTH), -127, 128, jnp.int8) for key in keys[2:]],
        "out": jax.random.normal(keys[1], (WIDTH, 16 * 8), jnp.float32) / WIDTH**0.5,
    }

    def apply(params, inputs):
        """Returns actions, FP32[batch, 16, 8]."""
        seen = inputs["image"].astype(jnp.float32).mean((1, 2, 3))[:, None] / 255
        inner = jnp.tanh(inputs["state"] @ params["into"] + seen)
        for layer in params["layers"]:
            inner = jnp.tanh(inner @ (layer.astype(jnp.float32) / (73 * WIDTH**0.5)))
        return {"actions": (inner @ params["out"]).reshape(-1, 16, 8)}

    return apply, params
