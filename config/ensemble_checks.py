"""Checks an ensemble's configuration, first by itself, and then against its members once they are loaded. Pure functions.

The error messages are Triton's. An ensemble tensor is either an input of the ensemble or an output of exactly one step. At
least one step reads it, or the ensemble returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tensord.config.model_config import ModelConfig, data_type_name, from_bytes, tensors_of
from tensord.shm.errors import InvalidArgument

PLATFORM = "ensemble"
#: The most steps of one ensemble, so that what a request costs stays bounded.
MAX_STEPS = 256


def is_ensemble(config: ModelConfig) -> bool:
    """Returns whether a configuration is an ensemble's, even if the configuration has mistakes."""
    return bool(config.HasField("ensemble_scheduling") or config.platform == PLATFORM)


def check(config: ModelConfig) -> None:
    """Raises InvalidArgument for the first mistake in an ensemble's configuration. The ensemble's members are not checked."""
    name, steps = config.name, config.ensemble_scheduling.step
    if not config.HasField("ensemble_scheduling"):
        raise InvalidArgument(f"ensemble scheduling must be set for ensemble {name} whose platform is {PLATFORM}")
    if config.backend:
        raise InvalidArgument(f"Ensemble model '{name}' must have platform type '{PLATFORM}' and empty backend type")
    if config.platform not in ("", PLATFORM):
        raise InvalidArgument(f"ensemble scheduling cannot be set for model '{name}' whose platform is not {PLATFORM}")
    if config.instance_group:
        raise InvalidArgument(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise InvalidArgument(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise InvalidArgument(f"model_warmup can not be specified for ensemble '{name}'")
    if "derivatives" in config.parameters:
        raise InvalidArgument(f"ensemble '{name}' cannot have derivatives; its members can")
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
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            if tensor.HasField("reshape"):
                raise InvalidArgument(f"{kind} '{tensor.name}' of ensemble '{name}' has a reshape; its members reshape")
    if "tensord_fuse" in config.parameters:
        raise InvalidArgument(
            f"ensemble '{name}' has the parameter tensord_fuse, which is no more: requests go through the programs of compiled "
            "models together without it; remove it"
        )
    _check_tensors(config)


def _check_tensors(config: ModelConfig) -> None:
    name = config.name
    given, asked = [field.name for field in config.input], [field.name for field in config.output]
    read: set[str] = set()
    written: dict[str, int] = {}
    for number, step in enumerate(config.ensemble_scheduling.step):
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
    steps = config.ensemble_scheduling.step
    made = {*given, *(tensor for number in in_order(config) for tensor in steps[number].output_map.values())}
    for tensor in asked:
        if tensor not in made:
            missing = _unconnected(config, tensor, written, made)
            why = f": at least one of its depending tensors, '{missing}', is not connected" if missing else ""
            raise InvalidArgument(f"output '{tensor}' for ensemble '{name}' is not written{why}")
    for step in config.ensemble_scheduling.step:
        for tensor in step.input_map.values():
            if tensor not in made:
                missing = _unconnected(config, tensor, written, made) or tensor
                raise InvalidArgument(
                    f"ensemble tensor '{tensor}' for ensemble '{name}' is not written: at least one of its depending tensors, "
                    f"'{missing}', is not connected"
                )
    for tensor in written:
        if tensor not in read and tensor not in asked:
            raise InvalidArgument(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def in_order(config: ModelConfig) -> list[int]:
    """Returns the indices of an ensemble's steps in an order in which the steps can run.

    Each step comes after the steps whose outputs it reads. A step is left out if one of its inputs is never written.
    """
    there = {field.name for field in config.input}
    waiting, ordered = dict(enumerate(config.ensemble_scheduling.step)), list[int]()
    while ready := [number for number, step in waiting.items() if there.issuperset(step.input_map.values())]:
        ordered += ready
        for number in ready:
            there.update(waiting.pop(number).output_map.values())
    return ordered


def _unconnected(config: ModelConfig, tensor: str, written: dict[str, int], writable: set[str]) -> str:
    if tensor not in written:
        return ""
    step = config.ensemble_scheduling.step[written[tensor]]
    return next(str(needed) for needed in sorted(step.input_map.values()) if needed not in writable)


# --------------------------------------------------------------------------------------------- an ensemble and its members


@dataclass(frozen=True, slots=True)
class _Tensor:
    model: str
    datatype: str
    dims: tuple[int, ...]
    batches: bool

    @property
    def full(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batches else self.dims


def not_loaded(ensemble: str, member: str, number: int, why: str) -> InvalidArgument:
    """Returns the error for an ensemble that needs the model ``member``, which is not loaded.

    ``number``: the version that is needed and not loaded, or -1 if no version of ``member`` is loaded.
    ``why``: why loading ``member`` failed, or "".
    """
    lacks = f"whose required version {number} is not loaded." if number > 0 else "which has no loaded version."
    failed = f" Model '{member}' loading failed with error: {why}" if why else ""
    return InvalidArgument(f"ensemble '{ensemble}' depends on '{member}' {lacks}{failed}")


def non_existing_output(ensemble: str, tensor: str, output: str, member: str) -> InvalidArgument:
    """Returns the error for an ensemble that takes its ``tensor`` from ``output``, which the model ``member`` lacks."""
    return InvalidArgument(
        f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {output} in model {member}"
    )


def completed(encoded: bytes, find: Callable[[str, int], ModelConfig]) -> ModelConfig:
    """Decodes an ensemble's configuration from protobuf, and checks it against the configurations of the ensemble's members.

    The returned configuration is decoupled if and only if a member is. ``find(name, version)`` returns a member's completed
    configuration. Version -1 means the newest. Raises InvalidArgument if ``encoded`` is malformed, if a name, datatype, shape
    or batch size does not fit the members, or if the inputs of one step come from several decoupled steps.
    """
    config = from_bytes(encoded)
    name = config.name
    known: dict[str, _Tensor] = {}
    _join(name, known, config, [(field.name, field) for field in tensors_of(config)])
    #: Ensemble tensor -> the step that answers more than once and from which it comes.
    origin: dict[str, int] = {}
    steps = list(config.ensemble_scheduling.step)
    for step in steps:
        member = find(step.model_name, step.model_version)
        # A member without a batch dimension may be among others that have one: it gets the whole tensors, if their shapes agree.
        if 0 < member.max_batch_size < config.max_batch_size:
            raise InvalidArgument(
                f"ensemble {name} allows maximum batch size {config.max_batch_size}, but it contains model {member.name} which "
                f"only allows maximum batch size to be {member.max_batch_size}"
            )
        _check_names(name, member, step)
        _join(name, known, member, [(step.input_map[f.name], f) for f in member.input if f.name in step.input_map])
        _join(name, known, member, [(step.output_map[f.name], f) for f in member.output if f.name in step.output_map])
    for number in in_order(config):
        step = steps[number]
        member = find(step.model_name, step.model_version)
        origins = {origin[tensor] for tensor in step.input_map.values() if tensor in origin}
        if len(origins) > 1:
            raise InvalidArgument(
                f"in ensemble {name}, step of model '{member.name}' receives inputs originated from different decoupled models"
            )
        if member.model_transaction_policy.decoupled:
            origins = {number}
        for tensor in step.output_map.values() if origins else ():
            (origin[tensor],) = origins
    config.model_transaction_policy.decoupled = any(
        find(step.model_name, step.model_version).model_transaction_policy.decoupled for step in steps
    )
    return config


def _check_names(ensemble: str, member: ModelConfig, step: Any) -> None:
    inputs, outputs = {field.name for field in member.input}, {field.name for field in member.output}
    for name, tensor in sorted(step.input_map.items()):
        if name not in inputs:
            raise InvalidArgument(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                f"{member.name}"
            )
    for name, tensor in sorted(step.output_map.items()):
        if name not in outputs:
            raise non_existing_output(ensemble, tensor, name, member.name)
    for field in member.input:
        if field.name not in step.input_map and not field.optional:
            raise InvalidArgument(
                f"in ensemble {ensemble}, input {field.name} in model {member.name} is not mapped to any ensemble tensors"
            )


def _join(ensemble: str, known: dict[str, _Tensor], model: ModelConfig, fields: Iterable[tuple[str, Any]]) -> None:
    for tensor, field in fields:
        said = _Tensor(model.name, data_type_name(field), tuple(field.dims), model.max_batch_size > 0)
        before = known.setdefault(tensor, said)
        what = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
        if before.datatype != said.datatype:
            raise InvalidArgument(
                f"{what}inconsistent data type: {before.datatype} is inferred from model {before.model} while {said.datatype} "
                f"is inferred from model {said.model}"
            )
        if not _agree(before.dims, said.dims) and not _agree(before.full, said.full):
            raise InvalidArgument(
                f"{what}inconsistent shape: {_listed(before.full)} is inferred from model {before.model} while "
                f"{_listed(said.full)} is inferred from model {said.model}"
            )


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _listed(dims: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, dims))}]"
