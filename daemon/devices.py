"""Which devices get a worker. Looks at files and variables; asking JAX would load it, and a CUDA context, into the supervisor."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from config import core_list
from config.options import Workers

_NODE = re.compile(r"nvidia([0-9]+)")


class NoDevice(Exception):
    """GPUs or cores were asked for that are not there."""


@dataclass(frozen=True, slots=True)
class Device:
    """One worker's device."""

    #: "cpu:0", "cuda:1": the worker's ``--device``, counted from 0 over all workers.
    name: str
    #: Variables that the worker's environment gets besides ours.
    environment: Mapping[str, str] = field(default_factory=dict)


def find_devices(options: Workers, environment: Mapping[str, str], folder: Path = Path("/dev")) -> list[Device]:
    """One device a worker. Raises NoDevice: ``workers.device`` is "cuda" and none is visible, or a core is not ours."""
    gpus = [] if options.device == "cpu" else visible_gpus(environment, folder)
    if options.device == "cuda" and not gpus:
        raise NoDevice(
            'workers.device is "cuda", but no GPU is visible (no /dev/nvidia*, or CUDA_VISIBLE_DEVICES is empty)'
        )
    if gpus:
        # Each worker sees its own GPU only: it cannot take memory of another one by accident.
        return [Device(f"cuda:{i}", {"CUDA_VISIBLE_DEVICES": gpu}) for i, gpu in enumerate(gpus)]
    _check_cores(options.cores)
    # GPUs stay visible to CPU workers: JAX is told to leave them alone, and clients may hand over tensors in CUDA regions.
    return [Device(f"cpu:{i}") for i in range(options.cpu)]


def _check_cores(lists: Sequence[str]) -> None:
    """What a CPU set of systemd or of a container leaves us is what workers can have."""
    ours = os.sched_getaffinity(0)
    for i, text in enumerate(lists):
        missing = set(core_list.parse(text)) - ours
        if missing:
            raise NoDevice(
                f"workers.cores: worker {i} is to run on cores {text}, but of those {core_list.describe(missing)} cannot be "
                f"used: this process may use {core_list.describe(ours)}"
            )


def visible_gpus(environment: Mapping[str, str], folder: Path = Path("/dev")) -> list[str]:
    """The entries of CUDA_VISIBLE_DEVICES (indices, UUIDs, MIG names), or the indices of the device nodes."""
    nodes = sorted(int(found[1]) for path in folder.glob("nvidia*") if (found := _NODE.fullmatch(path.name)))
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(i) for i in range(len(nodes))]
    # Without a device node the variable is a left-over of another machine's environment.
    return [entry for part in named.split(",") if (entry := part.strip()) and entry != "-1"] if nodes else []
