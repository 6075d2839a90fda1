"""Output is input, of any size: what is measured is moving the bytes."""


def create(path, config, device):
    """No parameters; each length is compiled when it is first asked for."""
    return lambda params, inputs: {"OUTPUT0": inputs["INPUT0"] * 1.0}, {}
