"""What workers' devices are called, in records, logs and errors.

    cpu:0        the first CPU worker
    cuda:1       the worker of the daemon's GPU 1, or the first of several
    cuda:1/2     the third worker of that GPU

What depends on where memory lies asks for the GPU, ``gpu_of``; what is kept apart worker by worker goes by the whole name.
"""

from __future__ import annotations


def gpu_of(device: str) -> str:
    """The GPU of a worker's device, "cuda:1"; "": the worker has none."""
    return device.partition("/")[0] if device.startswith("cuda:") else ""


def number_of(gpu: str) -> int:
    """1, of "cuda:1"."""
    return int(gpu.removeprefix("cuda:"))


def name(gpu: int, share: int = 0) -> str:
    """The device of one of a GPU's workers, ``share`` counted from 0."""
    return f"cuda:{gpu}/{share}" if share else f"cuda:{gpu}"
