"""Declares a network of 784 x 512 x 512 x 10 with ReLU: enough arithmetic that batching pays."""

import jax
import jax.numpy as jnp

batch_buckets = (1, 2, 4, 8, 16, 32, 64)


def create(path, config, device):
    """Returns the function, and weights from a fixed seed, so that both servers of a comparison have the same.

    They are float32 also where 64-bit types are on.
    """
    with jax.default_device(device):
        keys = jax.random.split(jax.random.PRNGKey(0), 3)
        shapes = ((784, 512), (512, 512), (512, 10))
        params = [jax.random.normal(key, shape, jnp.float32) * 0.05 for key, shape in zip(keys, shapes, strict=True)]

    def apply(params, inputs):
        x = inputs["x"]
        for weight in params[:-1]:
            x = jax.nn.relu(x @ weight)
        return {"logits": x @ params[-1]}

    return apply, params
