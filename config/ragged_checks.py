"""What can be wrong in a model's ``batch_input`` and ``batch_output``, in Triton's words where it has some."""

from __future__ import annotations

from typing import Any

from tensord.config.model_config import ModelConfig, data_type_name
from tensord.shm.errors import InvalidArgument

_DATATYPES = ("TYPE_INT32", "TYPE_FP32")


def check(message: ModelConfig, whole: bool) -> None:
    """``whole``: the model's tensors are all known. Raises InvalidArgument: the first finding."""
    name = message.name
    inputs = {tensor.name for tensor in message.input} if message.input or whole else None
    outputs = {tensor.name for tensor in message.output} if message.output or whole else None
    for tensor in message.batch_input:
        _check_source("batch input", name, tensor, inputs)
        if data_type_name(tensor) not in _DATATYPES:
            raise InvalidArgument(f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {name}")
    targets: set[str] = set()
    for cut in message.batch_output:
        _check_source("batch output", name, cut, inputs)
        for target in cut.target_name:
            if outputs is not None and target not in outputs:
                raise InvalidArgument(f"unknown target output name '{target}' for {name}")
            if target in targets:
                raise InvalidArgument(f"target output name '{target}' can only be specified once for {name}")
            targets.add(target)


def _check_source(what: str, model: str, tensor: Any, inputs: set[str] | None) -> None:
    kinds = tensor.DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_number
    if tensor.kind not in kinds:
        raise InvalidArgument(f"{what} has kind {tensor.kind}, which is none, for {model}")
    if len(tensor.source_input) != 1:
        raise InvalidArgument(
            f"{what} kind '{kinds[tensor.kind].name}' expects 1 source input, got {len(tensor.source_input)} for {model}"
        )
    for source in tensor.source_input:
        if inputs is not None and source not in inputs:
            raise InvalidArgument(f"unknown source input name '{source}' for {model}")
    if not tensor.target_name:
        raise InvalidArgument(f"{what} kind '{kinds[tensor.kind].name}' has no target_name for {model}")
