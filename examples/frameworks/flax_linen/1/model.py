"""Serves a Flax linen module: ``module.apply`` is the function, what ``init`` returned are the parameters."""

import jax
import jax.numpy as jnp
from flax import linen as nn

inputs = {"x": "FP32[8]"}
outputs = {"y": "FP32[3]"}
max_batch_size = 8


class Network(nn.Module):
    """A network of two layers."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(32)(x)))


def create(path, config, device):
    network = Network()
    # Trained ones: tensord.models.load(path / "params.msgpack"), as flax.serialization wrote them.
    params = network.init(jax.random.key(0), jnp.zeros((1, 8)))
    return (lambda params, inputs: {"y": network.apply(params, inputs["x"])}), params
