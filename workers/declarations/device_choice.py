"""Chooses on which of its worker's devices a model runs: on the first, or on as many as the model asks for.

devices = 4                          in model.py; parameters { key: "devices" value { string_value: "4" } } in config.pbtxt
instance_group { gpus: [ 2, 3 ] }    which devices; without this list the worker's first ones
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import jax

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.workers.devices.several_devices import SeveralDevices


def device_count(message: ModelConfig, module: ModuleType) -> int:
    """Returns how many devices a model asks for; 0: the model does not say.

    Raises: InvalidArgument: what the model gives is not a number of devices.
    """
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
    """Returns the numbers of the GPUs that a model runs on if its configuration does not list them; empty on a processor.

    Args:
      count: how many devices the worker has.
      gpu: the number of the worker's first GPU; None: the worker runs on the processor.
    Raises: InvalidArgument: ``devices`` of the model is not a number of devices.
    """
    said = device_count(message, module) if message.backend == "jax" else 0
    return () if gpu is None else range(gpu, gpu + min(max(1, said), count))


def chosen_devices(
    message: ModelConfig, count: int, devices: Sequence[jax.Device], gpu: int | None
) -> tuple[jax.Device, ...]:
    """Returns the devices that a model runs on.

    Args:
      count: how many devices the model asks for; 0: it does not say.
      devices: all devices of the worker.
      gpu: the number of the worker's first GPU; None: the worker runs on the processor.
    Raises: InvalidArgument: the model asks for more devices than there are; the message names both numbers.
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
    """Returns the device or devices that ``create`` gets, and those that programs run on (None: the worker's first device).

    Args:
      gpu: the number of the worker's first GPU; None: the worker runs on the processor.
      keeps_state: whether the model keeps state of sequences.
    Raises: InvalidArgument: the number of devices is malformed or too large.  Unsupported: state needs the worker's first device.
    """
    count = device_count(message, module)
    chosen = chosen_devices(message, count, devices, gpu)
    given = chosen if count else chosen[0]
    if chosen == (devices[0],):
        return given, None
    if keeps_state:
        raise Unsupported(f"model '{message.name}': state is kept on one device, and its worker's first one")
    return given, SeveralDevices(chosen)
