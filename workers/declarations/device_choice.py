"""Chooses which of its worker's devices a model runs on: the first, or as many as it asks for.

devices = 4                          in model.py; parameters { key: "devices" value { string_value: "4" } } in config.pbtxt
instance_group { gpus: [ 2, 3 ] }    which of them; without a list the first ones
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import jax

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.workers.devices.several_devices import SeveralDevices


def device_count(message: ModelConfig, module: ModuleType) -> int:
    """Returns how many devices a model asks for; 0: it does not say. Raises InvalidArgument: that is no number of devices."""
    given = getattr(module, "devices", None)
    where = "devices of model.py"
    if "devices" in message.parameters:
        text = message.parameters["devices"].string_value
        given, where = int(text) if text.isdecimal() else text, "parameter 'devices'"
    if given is None:
        return 0
    if type(given) is not int or given < 1:
        raise InvalidArgument(f"model '{message.name}': {where} is {given!r}, a number of devices from 1 is expected")
    return given


def gpus(message: ModelConfig, module: ModuleType, count: int, gpu: int | None) -> Sequence[int]:
    """Returns the numbers of the GPUs that a model runs on where it does not list them; none on the processor.

    Args:
      count: how many devices its worker has.
      gpu: the number of the worker's first GPU, None of the processor.
    Raises: InvalidArgument: as ``device_count``.
    """
    said = device_count(message, module) if message.backend == "jax" else 0
    return () if gpu is None else range(gpu, gpu + min(max(1, said), count))


def chosen_devices(
    message: ModelConfig, count: int, devices: Sequence[jax.Device], gpu: int | None
) -> tuple[jax.Device, ...]:
    """Returns the devices that a model runs on.

    Args:
      count: how many it asks for.
      devices: all of its worker's devices.
      gpu: the number of the worker's first GPU, None of the processor.
    Raises: InvalidArgument: it asks for more than there are; both numbers.
    """
    named = sorted({each - gpu for group in message.instance_group for each in group.gpus} if gpu is not None else ())
    own = [devices[index] for index in named if 0 <= index < len(devices)]
    if max(1, count) > len(own or devices):
        whose = "instance_group names" if 0 < len(own) < len(devices) else "its worker has"
        raise InvalidArgument(
            f"model '{message.name}' runs on {count} devices, and {whose} {len(own or devices)} (workers.devices_per_worker)"
        )
    return tuple((own or devices)[: max(1, count)])


def given_devices(
    message: ModelConfig, module: ModuleType, devices: Sequence[jax.Device], gpu: int | None, keeps_state: bool
) -> tuple[jax.Device | tuple[jax.Device, ...], SeveralDevices | None]:
    """Returns the devices that ``create`` gets, and those that programs run on; None: the worker's own.

    Raises: InvalidArgument: as the others.  Unsupported: a model with state can run only on the worker's first device.
    """
    count = device_count(message, module)
    chosen = chosen_devices(message, count, devices, gpu)
    given = chosen if count else chosen[0]
    if chosen == (devices[0],):
        return given, None
    if keeps_state:
        raise Unsupported(f"model '{message.name}': state is kept on one device, and its worker's first one")
    return given, SeveralDevices(chosen)
