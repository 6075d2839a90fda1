"""Serves a policy for a pole on a cart: from the state to the logits of pushing left and right. It starts untrained.

``examples/parameters/learner.py`` asks for gradients, and pushes better parameters while actors ask.
"""

import jax
import jax.numpy as jnp

max_batch_size = 6400  # a whole round of games, for the learner
derivatives = True
inputs = {"state": "FP32[4]"}
outputs = {"logits": "FP32[2]"}
batch_buckets = [32, 256, 6400]

HIDDEN = 32


def begin(seed=0):
    """Makes parameters of an untrained policy: both pushes are as likely."""
    first = jax.random.normal(jax.random.key(seed), (4, HIDDEN)) * 0.5
    return {
        "hidden": {"kernel": first, "bias": jnp.zeros(HIDDEN)},
        "action": {"kernel": jnp.zeros((HIDDEN, 2)), "bias": jnp.zeros(2)},
    }


def logits(params, state):
    """Computes a batch of logits."""
    hidden = jnp.tanh(state @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return hidden @ params["action"]["kernel"] + params["action"]["bias"]


def create(path, config, device):
    """Returns the function and its first parameters, version 0."""

    def apply(params, inputs):
        return {"logits": logits(params, inputs["state"])}

    return apply, begin()
