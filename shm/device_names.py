"""The names of workers' devices, in records, logs and errors.

    cpu:0        the first CPU worker
    cuda:1       the worker of the daemon's GPU 1, or the first of several
    cuda:1/2     the third worker of that GPU
    cuda:1#m     the worker on that GPU that serves only model 'm' (an isolated model); likewise cpu:0#m

Code that asks where memory lies uses the GPU, ``gpu_of``; code that tells workers apart uses the whole name.
"""

from __future__ import annotations

#: Separates the device from an isolated model; no model has it in its name.
_ALONE = "#"


def gpu_of(device: str) -> str:
    """Returns the GPU in a worker's device name: "cuda:1" for "cuda:1/2" or "cuda:1#m". It is "" for a CPU worker."""
    return device.partition(_ALONE)[0].partition("/")[0] if device.startswith("cuda:") else ""


def number_of(gpu: str) -> int:
    """Returns the number in a GPU's name: 1 for "cuda:1"."""
    return int(gpu.removeprefix("cuda:"))


def name(gpu: int, share: int = 0) -> str:
    """Returns a worker's device name: "cuda:1" for the GPU's first worker (``share`` 0), "cuda:1/2" for ``share`` 2."""
    return f"cuda:{gpu}/{share}" if share else f"cuda:{gpu}"


def alone(device: str, model: str) -> str:
    """Returns the name of the worker on ``device`` that serves only ``model``: "cuda:1#m" for "cuda:1" and "m"."""
    return f"{gpu_of(device) or device}{_ALONE}{model}"


def model_of(device: str) -> str:
    """Returns the model in the name of a worker that serves only one model: "m" for "cuda:1#m". Otherwise it is ""."""
    return device.partition(_ALONE)[2]


def shared(device: str) -> str:
    """Returns the device name of the worker that serves models that are not isolated: "cpu:0" for "cpu:0#m"."""
    return device.partition(_ALONE)[0]
