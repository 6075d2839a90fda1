"""Whether an ensemble is to be one program (the parameter ``tensord_fuse``), and what of its models does not allow that.

What only their code says (whether a model is compiled at all) is found where they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tensord.config.model_config import ModelConfig, tensors_of, wants
from tensord.shm.errors import InvalidArgument

PARAMETER = "tensord_fuse"


def is_wanted(message: ModelConfig) -> bool:
    """Raises InvalidArgument: it says neither yes nor no."""
    return wants(message, PARAMETER)


def describe(ensemble: str, why: str) -> str:
    """What is said of an ensemble that cannot be one program."""
    return f"ensemble '{ensemble}' cannot be one program, as {PARAMETER} asks for: {why}"


def check(message: ModelConfig, find: Callable[[str, int], ModelConfig]) -> None:
    """Of an ensemble whose graph is right. Raises InvalidArgument: the first reason why it cannot be one program."""
    if not is_wanted(message):
        return
    for field in message.input:
        if field.optional:
            raise InvalidArgument(describe(message.name, f"its input '{field.name}' is optional"))
    for step in message.ensemble_scheduling.step:
        member = find(step.model_name, step.model_version)
        for why in _reasons(message, member, step):
            raise InvalidArgument(describe(message.name, f"model '{member.name}' {why}"))


def _reasons(message: ModelConfig, member: ModelConfig, step: Any) -> Iterator[str]:
    if member.HasField("ensemble_scheduling"):
        if not is_wanted(member):
            yield "is an ensemble that does not ask for it itself"
    elif member.backend != "jax":
        yield f"is of backend '{member.backend}', not 'jax'"
    if member.HasField("sequence_batching"):
        yield "keeps sequences"
    if member.model_transaction_policy.decoupled:
        yield "may answer with several responses"
    if member.response_cache.enable:
        yield "has a response cache, which would not be asked"
    if member.batch_input or any(field.allow_ragged_batch for field in member.input):
        yield "has ragged inputs"
    if (member.max_batch_size > 0) != (message.max_batch_size > 0):
        both = (
            ("batches", "the ensemble does not")
            if member.max_batch_size > 0
            else ("does not batch", "the ensemble does")
        )
        yield f"{both[0]}, and {both[1]}"
    for field in tensors_of(member):
        if field.HasField("reshape"):
            yield f"reshapes '{field.name}'"
        if -1 in field.dims:
            yield f"has no fixed shape: '{field.name}' is [{', '.join(map(str, field.dims))}]"
    for field in member.input:
        if field.name not in step.input_map:
            yield f"has an input that no step gives it: '{field.name}'"
