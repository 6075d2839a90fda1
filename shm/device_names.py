"""The names of workers' devices in records, logs and errors.

    cpu:0        the first CPU worker
    cuda:1       the only worker, or the first of several, on the daemon's GPU 1
    cuda:1/2     the third worker on that GPU
    cuda:1#m     the worker on that GPU that serves only model 'm'; likewise cpu:0#m

Each worker has a name of its own. A worker on several GPUs is named by the first of them.
"""

from __future__ import annotations

#: Separates the device from an isolated model; no model has it in its name.
_ALONE = "#"


def gpu_of(device: str) -> str:
    """Returns the part of a worker's device name that names the GPU, such as "cuda:1". Returns "" for a CPU worker."""
    return device.partition(_ALONE)[0].partition("/")[0] if device.startswith("cuda:") else ""


def number_of(gpu: str) -> int:
    """Returns the number in a GPU's name: 1 for "cuda:1"."""
    return int(gpu.removeprefix("cuda:"))


def name(gpu: int, share: int = 0) -> str:
    """Returns the device name of a GPU's worker number ``share``: "cuda:1" for worker 0 of GPU 1, "cuda:1/2" for worker 2."""
    return f"cuda:{gpu}/{share}" if share else f"cuda:{gpu}"


def alone(device: str, model: str) -> str:
    """Returns the name of the worker on ``device`` that serves only ``model``: "cuda:1#m" for "cuda:1" and "m"."""
    return f"{gpu_of(device) or device}{_ALONE}{model}"


def model_of(device: str) -> str:
    """Returns the model in the name of a worker that serves only one model: "m" for "cuda:1#m". Else it returns ""."""
    return device.partition(_ALONE)[2]


def shared(device: str) -> str:
    """Returns the part of a worker's device name before "#": "cpu:0" for "cpu:0#m". Without "#" it returns the whole name."""
    return device.partition(_ALONE)[0]
