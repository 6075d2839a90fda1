"""Declares a model that takes 200 ms for each request."""

import time

inputs = {"INPUT0": "FP32[n]"}
outputs = {"OUTPUT0": "FP32[1]"}
host = True


def create(path, config, device):
    """Returns the model's function, which sleeps. It has no parameters."""

    def apply(params, inputs):
        time.sleep(0.2)
        return {"OUTPUT0": inputs["INPUT0"][:1]}

    return apply, {}
