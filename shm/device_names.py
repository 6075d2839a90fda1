"""The names of workers' devices, in records, logs and errors.

    cpu:0        the first CPU worker
    cuda:1       the worker of the daemon's GPU 1, or the first of several
    cuda:1/2     the third worker of that GPU
    cuda:1#m     the worker of that GPU, or beside that CPU worker, that has the model 'm' and no other one (an isolated model)

What depends on where memory lies asks for the GPU, ``gpu_of``; what is kept apart worker by worker goes by the whole name.
"""

from __future__ import annotations

#: Separates the device from an isolated model; no model has it in its name.
_ALONE = "#"


def gpu_of(device: str) -> str:
    """Returns the GPU of a worker's device, "cuda:1"; "" if the worker has none."""
    return device.partition(_ALONE)[0].partition("/")[0] if device.startswith("cuda:") else ""


def number_of(gpu: str) -> int:
    """Returns the number of a GPU: 1, of "cuda:1"."""
    return int(gpu.removeprefix("cuda:"))


def name(gpu: int, share: int = 0) -> str:
    """Names the device of one of a GPU's workers, ``share`` counted from 0."""
    return f"cuda:{gpu}/{share}" if share else f"cuda:{gpu}"


def alone(device: str, model: str) -> str:
    """Names the device of a worker that serves one isolated model. ``device``: that of the worker that other models share."""
    return f"{gpu_of(device) or device}{_ALONE}{model}"


def model_of(device: str) -> str:
    """Returns the isolated model of that device's worker; "": models share the worker."""
    return device.partition(_ALONE)[2]


def shared(device: str) -> str:
    """Returns the device of the shared worker beside an isolated model's one."""
    return device.partition(_ALONE)[0]
