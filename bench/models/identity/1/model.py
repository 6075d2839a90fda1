"""Declares a model that returns its input, of any size, so that moving the bytes is measured."""


def create(path, config, device):
    """Returns the function. It has no parameters, and is compiled for each length when the first request with it comes."""
    return lambda params, inputs: {"OUTPUT0": inputs["INPUT0"] * 1.0}, {}
