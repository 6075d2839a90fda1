"""Decides which isolated models need a worker process of their own now, and whether there is room for another one. Does no I/O.

wanted, loading, serving or being unloaded ─▶ its process runs          none of these ─▶ its process is stopped
"""

from __future__ import annotations

from collections.abc import Mapping

from tensord.config import model_checks, model_config
from tensord.config.options import Workers
from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.repository import FoundModel
from tensord.shm.device_names import gpu_of, model_of
from tensord.shm.errors import InvalidArgument


def wanted(lifecycle: Lifecycle, options: Workers) -> dict[str, float]:
    """Returns the devices of isolated models' workers that are needed now, each with its fraction of a GPU's memory (0 to 1)."""
    return {
        device: model_checks.isolated_fraction(model_config.from_bytes(config), options.isolated_memory_fraction)
        for device, config in lifecycle.isolated().items()
    }


def own(found: FoundModel, options: Workers) -> dict[str, float]:
    """Returns the devices (of ``found.devices``) of the workers that serve only this model, as ``wanted`` does; empty: none."""
    devices = [device for device in found.devices if model_of(device) == found.name]
    if not devices:
        return {}
    message = model_config.from_bytes(found.config)
    return dict.fromkeys(devices, model_checks.isolated_fraction(message, options.isolated_memory_fraction))


def check(found: FoundModel, taken: Mapping[str, float], options: Workers) -> None:
    """Checks that there is room for an isolated model's workers, on ``found.devices``; ``taken``: what ``wanted`` returns.

    Raises InvalidArgument: there are too many isolated models, or not enough memory on a GPU.
    """
    name, devices = found.name, own(found, options)
    others = {device: part for device, part in taken.items() if model_of(device) != name}
    count = len({model_of(device) for device in others})
    if devices and count >= options.max_isolated:
        raise InvalidArgument(
            f"model '{name}' is to have a worker to itself ({model_checks.ISOLATED}), and {count} models have one; at most "
            f"{options.max_isolated} may (workers.max_isolated)"
        )
    for device, part in devices.items():
        gpu = gpu_of(device)
        beside = sum(fraction for other, fraction in others.items() if gpu and gpu_of(other) == gpu)
        # Rounded, as these are sums of decimal fractions: 0.7 and three times 0.1 are 1.
        taken_before = round(options.gpu_memory_fraction + beside, 6)
        if gpu and (total := round(taken_before + part, 6)) > 1:
            raise InvalidArgument(
                f"model '{name}' is to have {part:g} of the memory of {gpu} to itself ({model_checks.ISOLATED_FRACTION}), and "
                f"{taken_before:g} of it are taken: {options.gpu_memory_fraction:g} by the workers that models share "
                f"(workers.gpu_memory_fraction), {round(beside, 6):g} by other isolated models; that would be {total:g}"
            )
