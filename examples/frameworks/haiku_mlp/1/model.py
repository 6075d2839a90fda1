"""Serves a Haiku function: ``hk.transform`` turns it into the pair of functions that is needed."""

import haiku as hk
import jax
import jax.numpy as jnp

inputs = {"x": "FP32[8]"}
outputs = {"y": "FP32[3]"}
max_batch_size = 8


def create(path, config, device):
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 3])(x)))
    # Trained ones: tensord.models.load(path / "params.npz"), or as they were saved.
    params = network.init(jax.random.PRNGKey(0), jnp.zeros((1, 8)))
    return (lambda params, inputs: {"y": network.apply(params, inputs["x"])}), params
