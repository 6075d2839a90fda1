"""Declares a recurrent network whose hidden state stays on the device, one for each sequence.

h' = tanh(x Wx + h Wh), y = h' Wo
"""

import jax
import jax.numpy as jnp

state = {"h": "FP32[256]"}


def create(path, config, device):
    """Returns the function, and weights from a fixed seed, so that both servers of a comparison have the same."""
    with jax.default_device(device):
        keys = jax.random.split(jax.random.PRNGKey(1), 3)
        shapes = {"wx": (64, 256), "wh": (256, 256), "wo": (256, 64)}
        params = {
            name: jax.random.normal(key, shape, jnp.float32) * 0.05
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def apply(params, inputs, state):
        h = jnp.tanh(inputs["x"] @ params["wx"] + state["h"] @ params["wh"])
        return {"y": h @ params["wo"]}, {"h": h}

    return apply, params
