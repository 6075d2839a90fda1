"""Declares a model into which parameters are pushed."""

import numpy as np

inputs = {"INPUT0": "FP32[4]"}
outputs = {"OUTPUT0": "FP32[4]"}


def create(path, config, device):
    """Returns the model's function, which adds its parameter."""
    return (lambda params, inputs: {"OUTPUT0": inputs["INPUT0"] + params["w"]}), {"w": np.zeros(4, np.float32)}
