"""Checks an ensemble against its members, with Triton's messages: names, datatypes, shapes, batch sizes.

It needs the members' completed configurations, so it runs after they were loaded, and after ``ensemble_checks``. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tensord.config import ensemble_checks
from tensord.config.model_config import ModelConfig, data_type_name, tensors_of
from tensord.shm.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One of the tensors that an ensemble's steps exchange, as the ensemble or one of its members declares it."""

    model: str
    datatype: str
    dims: tuple[int, ...]
    batches: bool

    @property
    def full(self) -> tuple[int, ...]:
        """Returns the tensor's dims, preceded by -1 for the batch if the model has a batch dimension."""
        return (-1, *self.dims) if self.batches else self.dims


def check(message: ModelConfig, find: Callable[[str, int], ModelConfig]) -> None:
    """Raises InvalidArgument for the first name, datatype, shape or batch size of an ensemble that does not fit its members.

    ``find``: returns the completed configuration of a member, by name and version; version -1 means the newest.
    """
    name = message.name
    known: dict[str, _Tensor] = {}
    _join(name, known, message, [(field.name, field) for field in tensors_of(message)])
    #: Ensemble tensor -> the step that answers more than once and from which it comes.
    origin: dict[str, int] = {}
    steps = list(message.ensemble_scheduling.step)
    for step in steps:
        member = find(step.model_name, step.model_version)
        # A member without a batch dimension may be among others that have one: it gets the whole tensors, if their shapes agree.
        if 0 < member.max_batch_size < message.max_batch_size:
            raise InvalidArgument(
                f"ensemble {name} allows maximum batch size {message.max_batch_size}, but it contains model {member.name} which "
                f"only allows maximum batch size to be {member.max_batch_size}"
            )
        _check_names(name, member, step)
        _join(name, known, member, [(step.input_map[f.name], f) for f in member.input if f.name in step.input_map])
        _join(name, known, member, [(step.output_map[f.name], f) for f in member.output if f.name in step.output_map])
    for number in ensemble_checks.in_order(message):
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


def decoupled(message: ModelConfig, find: Callable[[str, int], ModelConfig]) -> bool:
    """Returns whether an ensemble answers a request with any number of responses: whether any of its members does.

    ``find``: returns the completed configuration of a member, by name and version; version -1 means the newest.
    """
    return any(
        find(step.model_name, step.model_version).model_transaction_policy.decoupled
        for step in message.ensemble_scheduling.step
    )


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
            raise InvalidArgument(
                f"in ensemble {ensemble}, ensemble tensor {tensor} is mapped from non-existing output {name} in model "
                f"{member.name}"
            )
    for field in member.input:
        if field.name not in step.input_map and not field.optional:
            raise InvalidArgument(
                f"in ensemble {ensemble}, input {field.name} in model {member.name} is not mapped to any ensemble tensors"
            )


def _join(ensemble: str, known: dict[str, _Tensor], model: ModelConfig, fields: Iterable[tuple[str, Any]]) -> None:
    """Adds the ensemble tensors that a model declares to ``known``, and checks that those already there agree.

    Raises InvalidArgument: the datatypes or shapes of a tensor differ.
    Args:
      ensemble: the ensemble's name, for errors.
      known: ensemble tensor -> how a model has declared it first.
      fields: pairs of an ensemble tensor and the model's input or output.
    """
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
