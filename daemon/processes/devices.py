"""Decides which devices get a worker process, and which GPUs each worker sees, without loading JAX or the CUDA driver."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from tensord.config import core_list
from tensord.config.options import Workers
from tensord.daemon.processes.gpu_probe import probe
from tensord.shm import device_names

_log = logging.getLogger(__name__)
_VARIABLE = "CUDA_VISIBLE_DEVICES"
#: The variable for the part of a GPU's memory that XLA takes, and its former name; JAX ignores an empty one.
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
#: The package in which JAX looks for its plugins, and their group of entry points.
_PLUGINS = "jax_plugins"


class MissingDevice(Exception):
    """Raised if the options ask for GPUs or CPU cores that do not exist or that this process may not use."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one worker process, with the environment variables and CPU cores of the worker."""

    #: The worker's ``--device``, named by the first of its GPUs: "cpu:0", "cuda:1", "cuda:1/2" (``tensord.shm.device_names``).
    name: str
    #: Variables that the worker's environment gets besides ours.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: The cores near its GPUs, as Linux lists them; "": any.
    cores: str = ""
    #: The part of its GPU's memory that XLA takes, for an isolated model's worker. 0: it has no GPU.
    memory_fraction: float = 0.0

    def alone(self, name: str, memory_fraction: float) -> Device:
        """Returns the device of a worker that serves one isolated model, on the same GPU or CPU as this device.

        ``name``: the name of the new device. ``memory_fraction``: the fraction (0 to 1) of the GPU's memory that XLA takes there.
        """
        if not device_names.gpu_of(name):
            return Device(name, self.environment, self.cores)
        # The setting for shared workers must not apply there, whichever variable has it.
        own = dict.fromkeys(_MEMORY_VARIABLES, "") | {_MEMORY_VARIABLES[0]: f"{memory_fraction:g}"}
        return Device(name, {**self.environment, **own}, self.cores, memory_fraction)


def find_devices(
    options: Workers, environment: Mapping[str, str], folder: Path = Path("/dev"), system: Path = Path("/sys")
) -> list[Device]:
    """Returns a device for each worker process that should be started, and logs why GPUs cannot be used.

    Args:
      environment: holds CUDA_VISIBLE_DEVICES, which says which GPUs may be used.
      folder: the folder with the driver's device nodes.
      system: the folder in which sysfs is mounted.
    Raises MissingDevice if ``workers.device`` is "cuda" and no GPU can be used, or if a core of ``workers.cores`` cannot be used.
    """
    if options.device != "cpu":
        found = visible_gpus(environment, folder)
        gpus, reason = found.entries, found.reason
        if gpus:
            # Each worker sees its own GPUs only: it cannot take memory of another one by accident.
            each = options.devices_per_worker
            workers = [
                Device(
                    device_names.name(i, share),
                    {_VARIABLE: ",".join(gpus[i : i + each])},
                    near(found.addresses[i : i + each], system) if options.pin else "",
                )
                for share in range(options.per_gpu)
                for i in range(0, len(gpus), each)
            ]
            return workers + (_cpu_workers(options) if options.cpu_beside_gpus else [])
        if options.device == "cuda":
            raise MissingDevice(f'workers.device is "cuda", but {reason or "no GPU is visible"}')
        if reason:
            _log.warning("models run on the CPU: %s", reason)
    return _cpu_workers(options)


def _cpu_workers(options: Workers) -> list[Device]:
    _check_cores(options.cores)
    # GPUs stay visible to CPU workers: JAX is told to leave them alone, and clients may hand over tensors in CUDA regions.
    return [Device(f"cpu:{i}") for i in range(options.cpu)]


def _check_cores(lists: Sequence[str]) -> None:
    ours = os.sched_getaffinity(0)
    for i, text in enumerate(lists):
        missing = set(core_list.parse(text)) - ours
        if missing:
            raise MissingDevice(
                f"workers.cores: worker {i} is to run on cores {text}, but of those {core_list.describe(missing)} cannot be "
                f"used: this process may use {core_list.describe(ours)}"
            )


@dataclass(frozen=True, slots=True)
class VisibleGpus:
    """The GPUs that can be used, or why none can be used.

    ``entries``: one string for each GPU, as CUDA_VISIBLE_DEVICES takes it. ``addresses``: the PCI addresses of the GPUs.
    ``reason``: why no GPU can be used, for the log. It is "" if there is nothing to report.
    """

    entries: Sequence[str] = ()
    addresses: Sequence[str] = ()
    reason: str = ""


def visible_gpus(environment: Mapping[str, str], folder: Path = Path("/dev")) -> VisibleGpus:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES shows, or why there are none.

    ``environment``: holds that variable. ``folder``: the folder with the driver's device nodes.
    """
    named = environment.get(_VARIABLE)
    entries = None if named is None else [entry.strip() for entry in named.split(",")]
    if entries is not None and entries[0] in ("", "-1"):
        return VisibleGpus()  # hidden on purpose
    found = probe(environment)
    if found.trouble:
        nodes = sorted(path.name for path in folder.glob("nvidia[0-9]*"))
        # Without a GPU to drive, a driver that is not installed is no problem.
        said = f"{folder / nodes[0]} exists, but {found.trouble}" if nodes else "" if found.absent else found.trouble
        return VisibleGpus(reason=said)
    if not found.count:
        return VisibleGpus(reason="" if named is None else f"the CUDA driver shows no GPU for {_VARIABLE}={named}")
    if not _has_plugin():
        there = "is a GPU" if found.count == 1 else f"are {found.count} GPUs"
        said = f"there {there}, but JAX's plugin for CUDA is not installed (pip install 'tensord[cuda13]', or [cuda12])"
        return VisibleGpus(reason=said)
    if entries is None:
        return VisibleGpus([str(i) for i in range(found.count)], found.addresses)
    if found.count < len(entries):
        # CUDA reads the variable so: an entry that names no GPU hides those behind it.
        _log.warning("%s=%s names %d GPUs, the CUDA driver shows %d", _VARIABLE, named, len(entries), found.count)
    return VisibleGpus(entries[: found.count], found.addresses)


def _has_plugin() -> bool:
    """Returns whether JAX would find a CUDA plugin."""
    spec = importlib.util.find_spec(_PLUGINS)
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations or ())] if spec else []
    names += [point.value for point in metadata.entry_points(group=_PLUGINS)]
    return any("cuda" in name for name in names)


def near(addresses: Sequence[str], system: Path = Path("/sys")) -> str:
    """Returns the CPU cores near these GPUs that this process may use, such as "0-3,8".

    Returns "" if the host has one NUMA node, if the node of a GPU is not known, or if this process may use none of the cores.
    ``addresses``: the PCI addresses of the GPUs. ``system``: the folder in which sysfs is mounted.
    """
    nodes = {_node(address, system) for address in addresses}
    others = [path for path in (system / "devices/system/node").glob("node[0-9]*") if path.name not in nodes]
    if not others or "" in nodes:
        return ""
    cores: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for node in nodes:
            cores |= set(core_list.parse((system / "devices/system/node" / node / "cpulist").read_text().strip()))
    return core_list.describe(cores & os.sched_getaffinity(0))


def _node(address: str, system: Path) -> str:
    """Returns the NUMA node of a PCI address, such as "node0", or "" if it is unknown. ``system``: normally /sys."""
    with contextlib.suppress(OSError, ValueError):
        number = int((system / "bus/pci/devices" / address.lower() / "numa_node").read_text())
        return f"node{number}" if number >= 0 else ""
    return ""
