"""Checks the parts of an ensemble's configuration that can be checked without its members, with Triton's messages.

``ensemble_graph`` checks it against its members. An ensemble tensor is either an input of the ensemble or an
output of exactly one step; at least one step reads it, or the ensemble returns it.
"""

from __future__ import annotations

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument

PLATFORM = "ensemble"
#: The most steps of one ensemble, so that what a request costs stays bounded.
MAX_STEPS = 256


def is_ensemble(message: ModelConfig) -> bool:
    """Returns whether a configuration is an ensemble's, correct or not: it has ensemble_scheduling or platform "ensemble"."""
    return bool(message.HasField("ensemble_scheduling") or message.platform == PLATFORM)


def check(message: ModelConfig) -> None:
    """Raises InvalidArgument for the first mistake in an ensemble's configuration; the members' configurations are not needed."""
    name, steps = message.name, message.ensemble_scheduling.step
    if not message.HasField("ensemble_scheduling"):
        raise InvalidArgument(f"ensemble scheduling must be set for ensemble {name} whose platform is {PLATFORM}")
    if message.backend:
        raise InvalidArgument(f"Ensemble model '{name}' must have platform type '{PLATFORM}' and empty backend type")
    if message.platform not in ("", PLATFORM):
        raise InvalidArgument(f"ensemble scheduling cannot be set for model '{name}' whose platform is not {PLATFORM}")
    if message.instance_group:
        raise InvalidArgument(f"instance group should not be specified for ensemble '{name}'")
    if message.HasField("optimization"):
        raise InvalidArgument(f"optimization should not be specified for ensemble '{name}'")
    if message.model_warmup:
        raise InvalidArgument(f"model_warmup can not be specified for ensemble '{name}'")
    if not steps:
        raise InvalidArgument(f"must specify 'step' for ensemble '{name}'")
    if len(steps) > MAX_STEPS:
        raise InvalidArgument(f"ensemble '{name}' has {len(steps)} steps, at most {MAX_STEPS} are allowed")
    for number, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                raise InvalidArgument(f"must specify '{field}' in step {number} of ensemble '{name}'")
        if step.model_version < -1 or step.model_version == 0:
            raise InvalidArgument(
                f"step {number} of ensemble '{name}' asks for version {step.model_version} of '{step.model_name}'; versions "
                "start at 1, and -1 is the newest"
            )
    for given in message.input:
        if given.HasField("reshape"):
            raise InvalidArgument(f"input '{given.name}' of ensemble '{name}' has a reshape; its members reshape")
    for made in message.output:
        if made.HasField("reshape"):
            raise InvalidArgument(f"output '{made.name}' of ensemble '{name}' has a reshape; its members reshape")
    if "tensord_fuse" in message.parameters:
        raise InvalidArgument(
            f"ensemble '{name}' has the parameter tensord_fuse, which is no more: requests go through the programs of compiled "
            "models together without it; remove it"
        )
    _check_tensors(message)


def _check_tensors(message: ModelConfig) -> None:
    name = message.name
    given, asked = [field.name for field in message.input], [field.name for field in message.output]
    read: set[str] = set()
    written: dict[str, int] = {}
    for number, step in enumerate(message.ensemble_scheduling.step):
        read.update(step.input_map.values())
        for tensor in sorted(step.output_map.values()):
            if tensor in written or tensor in given:
                raise InvalidArgument(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' step {number}"
                )
            written[tensor] = number
    for kind, tensors, known in (("input", given, read), ("output", asked, {*read, *written})):
        for tensor in tensors:
            if tensor not in known:
                # Triton's sentence has this one quote.
                raise InvalidArgument(f"ensemble {kind} '{tensor}' for ensemble {name}' is not used")
    steps = message.ensemble_scheduling.step
    made = {*given, *(tensor for number in in_order(message) for tensor in steps[number].output_map.values())}
    for tensor in asked:
        if tensor not in made:
            missing = _unconnected(message, tensor, written, made)
            why = f": at least one of its depending tensors, '{missing}', is not connected" if missing else ""
            raise InvalidArgument(f"output '{tensor}' for ensemble '{name}' is not written{why}")
    for step in message.ensemble_scheduling.step:
        for tensor in step.input_map.values():
            if tensor not in made:
                missing = _unconnected(message, tensor, written, made) or tensor
                raise InvalidArgument(
                    f"ensemble tensor '{tensor}' for ensemble '{name}' is not written: at least one of its depending tensors, "
                    f"'{missing}', is not connected"
                )
    for tensor in written:
        if tensor not in read and tensor not in asked:
            raise InvalidArgument(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def in_order(message: ModelConfig) -> list[int]:
    """Returns the numbers of an ensemble's steps in an order in which each comes after all whose outputs it reads.

    A step that needs what neither the ensemble's inputs nor such a step give is left out.
    """
    there = {field.name for field in message.input}
    waiting, ordered = dict(enumerate(message.ensemble_scheduling.step)), list[int]()
    while ready := [number for number, step in waiting.items() if there.issuperset(step.input_map.values())]:
        ordered += ready
        for number in ready:
            there.update(waiting.pop(number).output_map.values())
    return ordered


def _unconnected(message: ModelConfig, tensor: str, written: dict[str, int], made: set[str]) -> str:
    """Returns an input that the step which writes ``tensor`` needs and that no step can write; "": no step writes ``tensor``.

    ``written``: tensor -> number of the step that would write it; ``made``: the tensors that can be written, and the inputs.
    """
    if tensor not in written:
        return ""
    step = message.ensemble_scheduling.step[written[tensor]]
    return next(str(needed) for needed in sorted(step.input_map.values()) if needed not in made)
