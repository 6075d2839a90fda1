"""Declares a softmax of ten numbers, the last step of a classifier: a model as small as ``addsub`` that batches."""

import jax

batch_buckets = (1, 2, 4, 8, 16, 32, 64)


def create(path, config, device):
    """Returns the function. It has no parameters."""
    return lambda params, inputs: {"probabilities": jax.nn.softmax(inputs["logits"], axis=-1)}, {}
