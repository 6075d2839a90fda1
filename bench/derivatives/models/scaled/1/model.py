"""16 MiB from 16 MiB."""

inputs, outputs, derivatives = {"x": f"FP32[{1 << 22}]"}, {"y": f"FP32[{1 << 22}]"}, True


def create(path, config, device):
    """Returns the function to run and its parameters."""
    return (lambda params, inputs: {"y": inputs["x"] * 3}), {}
