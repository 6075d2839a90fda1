"""Recognises handwritten digits of 8 x 8 pixels: a small convolutional network, trained by ``examples/train_digits.py``.

Held-out accuracy: 358 of 360 images (99.4 %). Inputs and outputs stand in config.pbtxt.
"""

import jax
import numpy as np


def convolve(x, kernel, bias):
    """Applies a 3 x 3 convolution that keeps the size, then ReLU. x: FP32[batch, 8, 8, in]; kernel: FP32[3, 3, in, out]."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions) + bias)


def halve(x):
    """Takes the maximum of each 2 x 2 square. FP32[batch, 2n, 2n, c] -> FP32[batch, n, n, c]."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def apply(params, inputs):
    """Computes the logits, FP32[batch, 10].

    image: FP32[batch, 64], row by row, 0 (paper) to 16 (ink), as scikit-learn gives it.
    """
    x = inputs["image"].reshape(-1, 8, 8, 1) / 16
    x = convolve(x, params["kernel_0"], params["bias_0"])
    x = halve(convolve(x, params["kernel_1"], params["bias_1"]))
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["weight_2"] + params["bias_2"])
    return {"logits": x @ params["weight_3"] + params["bias_3"]}


def create(path, config, device):
    """Returns the function to compile and its parameters. The worker calls it."""
    with np.load(path / "params.npz") as file:
        return apply, dict(file)
