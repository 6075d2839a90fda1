"""Reads on which devices a model runs, whether its parameters may leave them, and whether a batch mixes parameter sets.

devices = 4                          how many devices the model runs on
instance_group { gpus: [ 2, 3 ] }    the GPUs that the model runs on; by default the first GPUs of its worker
memory_policy = "on_demand"          the parameters may leave the device while there are no requests for the model
batch_sets = True                    requests with different parameter sets can run in one batch: apply(stacked, inputs, index)
batch_sets = ("adapter",)            the same, but only the parameters below "adapter" differ between parameter sets
resident_sets = 64                   how many parameter sets the device holds at a time; by default max_batch_size

``instance_group`` is a field of config.pbtxt. Each of the four other settings is a variable of model.py, or a text in
``parameters`` of config.pbtxt, such as "4", "true" or "adapter,head". If a setting is in both files, config.pbtxt is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.workers.devices.several_devices import SeveralDevices
from tensord.workers.parameters.set_stack import SetDeclaration

RESIDENT, ON_DEMAND = "resident", "on_demand"
_MOST = 1 << 16


def _declared(config: ModelConfig, module: ModuleType, name: str, default: Any = None) -> tuple[Any, str, bool]:
    if name in config.parameters:
        return config.parameters[name].string_value, f"parameter '{name}'", True
    return getattr(module, name, default), f"{name} of model.py", False


def _number(text: str) -> int | str:
    # Longer texts exceed every bound, and int() refuses those of more than 4300 digits with an error of its own.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 11 else text


def device_count(config: ModelConfig, module: ModuleType) -> int:
    """Returns how many devices a model declares, or 0 if none. Raises InvalidArgument if the value is no integer above 0."""
    given, where, is_text = _declared(config, module, "devices")
    if is_text:
        given = _number(given)
    if given is None:
        return 0
    if type(given) is not int or given < 1:
        raise InvalidArgument(f"model '{config.name}': {where} is {given!r}, a number of devices from 1 is expected")
    return given


def gpus(config: ModelConfig, module: ModuleType, count: int, gpu: int | None) -> Sequence[int]:
    """Returns the numbers of the GPUs that a model runs on if the model's configuration names no GPUs.

    The result is the first GPUs of the worker: as many as the devices that a JAX model declares, else 1; at most ``count``.
    The result is empty if ``gpu`` is None. ``module``: the model's model.py. ``count``: how many devices the worker has.
    ``gpu``: the number of the worker's first GPU, or None if the worker runs on the CPU.
    """
    said = device_count(config, module) if config.backend == "jax" else 0
    return () if gpu is None else range(gpu, gpu + min(max(1, said), count))


def chosen_devices(
    config: ModelConfig, count: int, devices: Sequence[jax.Device], gpu: int | None
) -> tuple[jax.Device, ...]:
    """Returns the devices on which a model runs: some or all of ``devices``, the devices of the model's worker.

    ``count``: how many devices the model needs; 0 means 1. ``gpu``: the number of the worker's first GPU, or None for a CPU.
    Raises InvalidArgument if the worker, or the model's ``instance_group``, has fewer devices than the model needs.
    """
    named = sorted({each - gpu for group in config.instance_group for each in group.gpus} if gpu is not None else ())
    own = [devices[index] for index in named if 0 <= index < len(devices)]
    if max(1, count) > len(own or devices):
        whose = "instance_group names" if 0 < len(own) < len(devices) else "its worker has"
        raise InvalidArgument(
            f"model '{config.name}' runs on {count} devices, and {whose} {len(own or devices)} (workers.devices_per_worker)"
        )
    return tuple((own or devices)[: max(1, count)])


def given_devices(
    config: ModelConfig, module: ModuleType, devices: Sequence[jax.Device], gpu: int | None, keeps_state: bool
) -> tuple[jax.Device | tuple[jax.Device, ...], SeveralDevices | None]:
    """Chooses the devices that a model's ``create`` gets as its argument, and the devices on which the model's programs run.

    The first result is a tuple if the model declares how many devices it needs, else a single device. The second result is None
    if the programs run only on the worker's first device. ``keeps_state``: whether the model has state.
    ``devices``: all devices of the worker. ``gpu``: the number of the worker's first GPU, or None if the worker has no GPU.
    Raises InvalidArgument if the declared number of devices is malformed or too large. Raises Unsupported if a model with state
    would run on any device except the worker's first device.
    """
    count = device_count(config, module)
    chosen = chosen_devices(config, count, devices, gpu)
    given = chosen if count else chosen[0]
    if chosen == (devices[0],):
        return given, None
    if keeps_state:
        raise Unsupported(f"model '{config.name}': state is kept on one device, and its worker's first one")
    return given, SeveralDevices(chosen)


def is_on_demand(config: ModelConfig, module: ModuleType) -> bool:
    """Returns whether the model's ``memory_policy`` lets the worker take the model's parameters off the device.

    Raises InvalidArgument if ``memory_policy`` is unknown. Raises Unsupported if the parameters may leave the device, but the
    model is not compiled by the worker.
    """
    given, where, _ = _declared(config, module, "memory_policy", RESIDENT)
    if given not in (RESIDENT, ON_DEMAND):
        raise InvalidArgument(f"model '{config.name}': {where} is {given!r}, '{RESIDENT}' or '{ON_DEMAND}' is expected")
    if given == ON_DEMAND and (config.backend != "jax" or getattr(module, "host", False)):
        raise Unsupported(
            f"model '{config.name}': {where} is '{ON_DEMAND}', which is for models that are compiled: others have no "
            "parameters on the device that the server knows"
        )
    return bool(given == ON_DEMAND)


def declare_sets(config: ModelConfig, module: ModuleType) -> SetDeclaration | None:
    """Reads which parameters differ between a model's parameter sets, and how many sets its device may hold at a time.

    The model's configuration or its Python module declares these as ``batch_sets`` and ``resident_sets``. Returns None if
    ``batch_sets`` is not declared. Raises InvalidArgument if a declaration is malformed. Raises Unsupported if the model is of
    a kind whose batches cannot mix sets, such as a host model.
    """
    model, names = config.name, _names(config, module)
    resident, where, is_text = _declared(config, module, "resident_sets")
    if is_text:
        resident = _number(resident)
    if resident is not None and type(resident) is not int:
        raise InvalidArgument(f"model '{model}': {where} is {resident!r}, a number of sets is expected")
    if names is None:
        if resident is not None:
            raise InvalidArgument(f"model '{model}': {where} is given, but batch_sets is not")
        return None
    why = _unsupported(config, module)
    if why:
        raise Unsupported(f"model '{model}': batch_sets is for jitted functions of one call a request; {why}")
    least = config.max_batch_size
    if not least:
        raise InvalidArgument(
            f"model '{model}': batch_sets is given, but max_batch_size is 0: it has no batch dimension"
        )
    if resident is not None and not least <= resident <= _MOST:
        raise InvalidArgument(
            f"model '{model}': {where} is {resident}, between {least} (max_batch_size) and {_MOST} are possible"
        )
    return SetDeclaration(names, resident or least)


def _names(config: ModelConfig, module: ModuleType) -> tuple[str, ...] | None:
    given, where, is_text = _declared(config, module, "batch_sets", False)
    if is_text:
        given = {"true": True, "false": False}.get(given.lower(), tuple(name.strip() for name in given.split(",")))
    if given is True:
        return ()  # all of them
    if given is False:
        return None  # a batch has one set
    if isinstance(given, (tuple, list)) and given and all(isinstance(name, str) and name for name in given):
        return tuple(given)
    raise InvalidArgument(
        f"model '{config.name}': {where} is {given!r}; True, False, or names of parameters are expected, as in ('adapter',)"
    )


def _unsupported(config: ModelConfig, module: ModuleType) -> str:
    """Returns why the model cannot mix parameter sets in a batch; "": it can."""
    if config.backend != "jax":
        return "a Triton Python model has no parameters that the server knows"
    if hasattr(module, "source"):
        return f"{module.source} takes parameters and inputs alone"
    if getattr(module, "host", False):
        return "a host model is none"
    if hasattr(module, "slots"):
        return "a stepped model is none"
    if config.HasField("sequence_batching"):
        return "a sequence keeps the set that it began with"
    return ""
