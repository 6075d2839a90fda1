"""Decides which workers load a model: the workers on its configured devices, or fewer if a setting requires that. No I/O.

    instance_group.kind              the GPU workers, if there are any; for KIND_CPU the CPU workers, if there are any
    instance_group.gpus              the workers of these GPUs
    preserve_ordering                one worker
    max_queue_size                   one worker, if the limit is too small to be divided among several workers
    rate limiter, global resource    one worker, the same for all models that need this resource, or a refusal
    rate limiter, other resources    one worker on each chosen GPU, and one on the CPU if a CPU is chosen
    tensord_together (a parameter)   one worker for all models with the same value, so that they may call each other
    isolated (a parameter)           a worker for this model alone on each chosen GPU, and one on the CPU if a CPU is chosen

A single worker is chosen by rendezvous hashing of the devices with the model's name, the value of tensord_together, or the same
text for every model that the rate limiter limits. So a model has the same worker after every restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from tensord.config import model_checks
from tensord.config.model_checks import TOGETHER
from tensord.config.model_config import ModelConfig, is_ordered
from tensord.shm import device_names
from tensord.shm.device_names import gpu_of, number_of
from tensord.shm.device_names import name as device_name
from tensord.shm.errors import InvalidArgument

#: A bound on a queue is shared out among workers if each one's share is at least this.
_LEAST_SHARE = 4


def place(config: ModelConfig, devices: Sequence[str], rate_limited: bool, each: int = 1) -> tuple[str, ...]:
    """Returns the device names of the workers that must load a model, such as "cuda:2", or "cuda:2#m" for the isolated model m.

    Args:
      devices: the device names of the workers that may run several models. A worker of several GPUs has its first GPU's name.
      rate_limited: if true, a model that needs rate-limiter resources is loaded only by workers that count these resources.
      each: the number of GPUs of each worker.
    Raises InvalidArgument if the model needs GPUs that no worker has, or if its settings contradict each other.
    """
    chosen = _shared(config, devices, rate_limited, each)
    return _alone(config, chosen) if model_checks.is_isolated(config) else chosen


def _alone(config: ModelConfig, chosen: tuple[str, ...]) -> tuple[str, ...]:
    gpus = dict.fromkeys(gpu for device in chosen if (gpu := gpu_of(device)))
    cpus = [device for device in chosen if not gpu_of(device)]
    beside = [choose(("isolated", config.name), cpus)] if cpus else []
    return tuple(device_names.alone(device, config.name) for device in (*gpus, *beside))


def _shared(config: ModelConfig, devices: Sequence[str], rate_limited: bool, each: int) -> tuple[str, ...]:
    chosen = _named(config, devices, each)
    together = config.parameters[TOGETHER].string_value if TOGETHER in config.parameters else ""
    if rate_limited and model_checks.is_isolated(config) and _needs(config):
        raise InvalidArgument(
            f"model '{config.name}' is to have a worker to itself ({model_checks.ISOLATED}), where nobody counts the resources "
            "that it shares with others (rate_limiter)"
        )
    sharing = _sharing(config, chosen) if rate_limited else chosen
    if sharing != chosen and together:
        raise InvalidArgument(
            f"model '{config.name}' is to be on the worker of '{together}' ({TOGETHER}) and on the one with the resources "
            "that it shares with others (rate_limiter)"
        )
    chosen = sharing
    if len(chosen) > 1 and together:
        return (choose(("together", together), chosen),)
    if len(chosen) > 1 and (is_ordered(config) or 0 < _least_bound(config) < _LEAST_SHARE * len(chosen)):
        return (choose(("model", config.name), chosen),)
    return chosen


def say_kinds(config: ModelConfig, devices: Sequence[str]) -> bool:
    """Changes a model's KIND_AUTO and KIND_MODEL groups to KIND_GPU if ``devices`` has GPUs and CPUs. Returns True if it did."""
    changed = False
    if any(map(gpu_of, devices)) and not all(map(gpu_of, devices)):
        for group in config.instance_group:
            if group.kind in (group.KIND_AUTO, group.KIND_MODEL):
                group.kind, changed = group.KIND_GPU, True
    return changed


def _named(config: ModelConfig, devices: Sequence[str], each: int) -> tuple[str, ...]:
    gpus = [device for device in devices if gpu_of(device)]
    cpus = [device for device in devices if not gpu_of(device)]
    wanted = set() if config.instance_group else {*(gpus or devices)}
    for index, group in enumerate(config.instance_group):
        name = f"instance group {group.name or f'{config.name}_{index}'} of model {config.name}"
        if devices and not gpus and group.kind == group.KIND_GPU:
            raise InvalidArgument(f"{name} has kind KIND_GPU but no GPUs are available")
        if not gpus or (cpus and group.kind == group.KIND_CPU):
            wanted |= {*cpus}
            continue
        for gpu in group.gpus:
            if _first(gpu, each) not in gpus:
                kind = type(group).Kind.Name(group.kind)
                first = sorted({number_of(gpu_of(device)) for device in gpus})
                known = ", ".join(str(one) if each == 1 else f"{one}-{one + each - 1}" for one in first)
                raise InvalidArgument(
                    f"{name} has kind {kind} but specifies invalid or unsupported gpu id {gpu}. GPUs that models run on are: "
                    f"{known}"
                )
        named = {_first(gpu, each) for gpu in group.gpus}
        wanted |= {device for device in gpus if not named or gpu_of(device) in named}
    return tuple(device for device in devices if device in wanted)


def _first(gpu: int, each: int) -> str:
    """Returns the name, such as "cuda:2", of the first GPU of the workers with GPU ``gpu``. ``each``: the GPUs per worker."""
    return device_name(gpu - gpu % each)


def _sharing(config: ModelConfig, chosen: tuple[str, ...]) -> tuple[str, ...]:
    needs = _needs(config)
    if len(chosen) < 2 or not needs:
        return chosen
    # The choice does not depend on the model: all that share a resource have to be where the one count of it is.
    if any(getattr(each, "global") for each in needs):
        return (choose("rate limiter", chosen),)
    places: dict[str, list[str]] = {}
    for device in chosen:
        places.setdefault(gpu_of(device), []).append(device)
    counted = {choose("rate limiter", workers) for workers in places.values()}
    return tuple(device for device in chosen if device in counted)


def resources(config: ModelConfig, devices: Sequence[str]) -> dict[str, str | None]:
    """Returns the rate-limiter resources that a model needs, by lower-case name.

    A value is the worker that counts the resource, if it is global, or None if each device has its own.
    ``devices``: the devices of the model as ``place`` has chosen them.
    """
    return {each.name.lower(): "".join(devices[:1]) if getattr(each, "global") else None for each in _needs(config)}


def check_resources(name: str, needs: Mapping[str, str | None], others: Mapping[str, Mapping[str, str | None]]) -> None:
    """Raises InvalidArgument if a resource of the model ``name`` is not counted where it is for another model.

    It may be global for one of them and per device for the other, or the two may have different GPUs or kinds.
    ``needs``: the resources of the model, as ``resources`` returns them. ``others``: model name -> its resources, likewise.
    """
    for other, known in others.items():
        for resource in needs.keys() & known.keys() if other != name else ():
            mine, its = needs[resource], known[resource]
            if (mine is None) != (its is None):
                kinds = {True: "one of each device", False: "global"}
                raise InvalidArgument(
                    f'Resource "{resource}" is present as both global and device-specific resource in the model configuration: '
                    f"it is {kinds[mine is None]} in model '{name}', {kinds[its is None]} in model '{other}'"
                )
            if mine != its:
                raise InvalidArgument(
                    f"global resource '{resource}' is counted by one worker: model '{name}' would be on {mine}, and model "
                    f"'{other}' is on {its} (instance_group: gpus, kind)"
                )


def _needs(config: ModelConfig) -> list[Any]:
    return [each for group in config.instance_group for each in group.rate_limiter.resources if each.count]


def _least_bound(config: ModelConfig) -> int:
    """Returns the smallest nonzero ``max_queue_size`` of the model's queues; 0: every queue is unlimited."""
    batching = config.dynamic_batching
    policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
    return min((policy.max_queue_size for policy in policies if policy.max_queue_size), default=0)


def choose(identity: object, names: Iterable[str]) -> str:
    """Chooses one of ``names`` by rendezvous hashing with ``repr(identity)``. There must be at least one name."""
    key = blake2b(repr(identity).encode("utf-8", "surrogatepass")).digest()
    return max(names, key=lambda name: blake2b(name.encode(), key=key).digest())
