"""Declares a model that answers with the strings that it was asked with."""

inputs = {"INPUT0": "BYTES[n]"}
outputs = {"OUTPUT0": "BYTES[n]"}
host = True


def create(path, config, device):
    """Returns the model's function. It has no parameters."""
    return (lambda params, inputs: {"OUTPUT0": inputs["INPUT0"]}), {}
