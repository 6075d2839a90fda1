"""What can be wrong in a model's ``sequence_batching``, in Triton's words.

control_input    named; of each kind at most one; START, END and READY have one pair of values, CORRID has a datatype
oldest, direct   sizes and shares that can be reached
"""

from __future__ import annotations

from typing import Any

from tensord.config.model_config import ModelConfig
from tensord.protocol import model_config_pb2
from tensord.shm.errors import InvalidArgument

_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def check(message: ModelConfig) -> None:
    """Raises InvalidArgument: the first finding."""
    name, sequences = message.name, message.sequence_batching
    _check_controls(message)
    limit = message.max_batch_size
    for size in sequences.oldest.preferred_batch_size:
        if size < 1:
            raise InvalidArgument(f"sequence batching preferred batch size must be positive for {name}")
        # A limit of 0 may still be filled in by the model itself; the worker checks again then.
        if 0 < limit < size:
            raise InvalidArgument(f"sequence batching preferred batch size must be <= max batch size for {name}")
    if sequences.oldest.max_candidate_sequences < 0:
        raise InvalidArgument(
            f"sequence batching max_candidate_sequences is {sequences.oldest.max_candidate_sequences}, "
            f"it must not be negative for {name}"
        )
    if not 0 <= sequences.direct.minimum_slot_utilization <= 1:
        raise InvalidArgument(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}")


def _check_controls(message: ModelConfig) -> None:
    name = message.name
    kinds = model_config_pb2.ModelSequenceBatching.Control.Kind
    seen: dict[int, str] = {}
    inputs = {tensor.name for tensor in message.input}
    tensors: set[str] = set()
    for tensor in message.sequence_batching.control_input:
        if not tensor.name:
            raise InvalidArgument(f"sequence batching control tensor must have a name for {name}")
        if len(tensor.control) > 1 or tensor.name in tensors:
            raise InvalidArgument(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for {name}"
            )
        tensors.add(tensor.name)
        if tensor.name in inputs:
            raise InvalidArgument(f"sequence batching control tensor '{tensor.name}' is an input as well for {name}")
        for control in tensor.control:
            kind = kinds.Name(control.kind) if control.kind in kinds.values() else str(control.kind)
            if control.kind in seen:
                raise InvalidArgument(f"sequence batching specifies multiple {kind} tensors for {name}")
            seen[control.kind] = tensor.name
            _check_values(name, kind, control)


def _check_values(name: str, kind: str, control: Any) -> None:
    given = [field for field in _VALUES if len(getattr(control, field))]
    if kind == "CONTROL_SEQUENCE_CORRID":
        if given:
            raise InvalidArgument(
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
                f"for {kind} for {name}"
            )
        types = model_config_pb2.DataType
        if control.data_type not in [types.Value(each) for each in _CORRID_TYPES]:
            raise InvalidArgument(
                f"unexpected data type for control {kind} for {name}. Allowed data types are TYPE_UINT64, TYPE_INT64, "
                "TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    if not given:
        raise InvalidArgument(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            f"for {kind} for {name}"
        )
    if len(given) > 1:
        raise InvalidArgument(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' "
            f"for {kind} for {name}"
        )
    if len(getattr(control, given[0])) != 2:
        raise InvalidArgument(
            f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {name}"
        )
