"""Which workers load a model: those of the devices that its configuration names, or one where its promises need that. Pure.

    instance_group.gpus                      the workers of these GPUs
    preserve_ordering                        one worker: between two nobody knows whose answer comes first
    max_queue_size                           one worker, where a share of each would be so small that it refuses too early
    resources of the rate limiter            one worker for all models that share some over the whole host
    tensord_together (a parameter)           one worker for all models with the same value, so that they may call each other

One worker is found by rendezvous of the model, or of that value, and the devices: the same one after every restart, another one
for another model.
"""

from __future__ import annotations

from collections.abc import Sequence

from config.model_config import ModelConfig, is_ordered
from shm import rendezvous
from shm.errors import InvalidArgument

#: A bound on a queue is shared out where each worker's share is at least that.
_LEAST_SHARE = 4
#: Models that name the same are on one worker.
TOGETHER = "tensord_together"


def place(message: ModelConfig, devices: Sequence[str], rate_limited: bool, each: int = 1) -> tuple[str, ...]:
    """The devices whose workers load it, of those that have a worker.

    Args:
      rate_limited: whether resources of the rate limiter are looked at.
      each: how many GPUs a worker has, of which its device is the first.
    Raises: InvalidArgument: it names GPUs that are not there; or asks for one worker for two reasons, which are two workers.
    """
    chosen = _named(message, devices, each)
    together = message.parameters[TOGETHER].string_value if TOGETHER in message.parameters else ""
    if len(chosen) > 1 and rate_limited and _shares_resources(message, on_gpus=chosen[0].startswith("cuda:")):
        if together:
            raise InvalidArgument(
                f"model '{message.name}' is to be on the worker of '{together}' ({TOGETHER}) and on the one with the resources "
                "that it shares with others (rate_limiter)"
            )
        # Not by the model: all that share anything have to be where the one count of it is.
        return (rendezvous.choose("rate limiter", chosen),)
    if len(chosen) > 1 and together:
        return (rendezvous.choose(("together", together), chosen),)
    if len(chosen) > 1 and (is_ordered(message) or 0 < _least_bound(message) < _LEAST_SHARE * len(chosen)):
        return (rendezvous.choose(("model", message.name), chosen),)
    return chosen


def _named(message: ModelConfig, devices: Sequence[str], each: int) -> tuple[str, ...]:
    gpus = [device for device in devices if device.startswith("cuda:")]
    groups = [group for group in message.instance_group if group.gpus]
    if not gpus or not groups:
        return tuple(devices)
    for index, group in enumerate(message.instance_group):
        for gpu in group.gpus:
            if _worker(gpu, each) not in gpus:
                kind = type(group).Kind.Name(group.kind)
                first = [int(device.removeprefix("cuda:")) for device in gpus]
                known = ", ".join(str(one) if each == 1 else f"{one}-{one + each - 1}" for one in first)
                raise InvalidArgument(
                    f"instance group {group.name or f'{message.name}_{index}'} of model {message.name} has kind {kind} but "
                    f"specifies invalid or unsupported gpu id {gpu}. GPUs that models run on are: {known}"
                )
    if len(groups) < len(message.instance_group):
        return tuple(devices)  # a group without a list is on each of them
    wanted = {_worker(gpu, each) for group in groups for gpu in group.gpus}
    return tuple(device for device in devices if device in wanted)


def _worker(gpu: int, each: int) -> str:
    """The device of the worker that has it."""
    return f"cuda:{gpu - gpu % each}"


def _shares_resources(message: ModelConfig, on_gpus: bool) -> bool:
    """Whether it needs what other workers use up as well: each GPU has resources of its own, the processor is one device."""
    return any(
        resource.count and (getattr(resource, "global") or not on_gpus)
        for group in message.instance_group
        for resource in group.rate_limiter.resources
    )


def _least_bound(message: ModelConfig) -> int:
    """The smallest bound on any of its queues; 0: none has one."""
    batching = message.dynamic_batching
    policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
    return min((policy.max_queue_size for policy in policies if policy.max_queue_size), default=0)
