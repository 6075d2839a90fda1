"""Foretells where a car drives: from its state (position, heading, speed) and 64 pairs of acceleration and steering."""

import jax
import jax.numpy as jnp

inputs = {"state": "FP32[4]", "actions": "FP32[64, 2]"}
outputs = {"states": "FP32[64, 4]"}
derivatives = True

SECONDS = 0.02


def move(state, action):
    """Returns the state after one fiftieth of a second."""
    _, _, heading, speed = state
    change = jnp.stack([speed * jnp.cos(heading), speed * jnp.sin(heading), speed * action[1], action[0] - 0.1 * speed])
    return state + SECONDS * change


def create(path, config, device):
    def apply(params, inputs):
        def ahead(state, action):
            state = move(state, action)
            return state, state

        return {"states": jax.lax.scan(ahead, inputs["state"], inputs["actions"])[1]}

    return apply, {}
