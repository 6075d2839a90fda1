"""Reads how a model's configuration treats sequences, and makes the control inputs that tell the model about them.

    START, END, READY    one of two values that the configuration gives, as INT32, FP32 or BOOL
    CORRID               the correlation id

Clients do not send control inputs. A control input of a request has one element, in shape [1], or [1, 1] if the model batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tensord.config.model_config import ModelConfig, data_type_name
from tensord.protocol import model_config_pb2
from tensord.shm import datatypes
from tensord.shm.arrays import DTYPES, Array
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import RequestRecord
from tensord.workers.declarations.request_inputs import RequestInputs
from tensord.workers.scheduling.dynamic_batcher import BatchRules
from tensord.workers.scheduling.sequence import Asked, Controls, IterativeIds
from tensord.workers.scheduling.sequence_batcher import DirectBatcher, DirectRules, OldestBatcher, Strategy
from tensord.workers.scheduling.sequence_table import SequenceRules
from tensord.workers.tensors.request_tensors import RequestTensors
from tensord.workers.tensors.signature import TensorSpec

_DATATYPES = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
#: Kind of a control input -> the flag that it holds; READY is true for every request.
_ASKS: dict[str, Callable[[Controls], bool]] = {
    "CONTROL_SEQUENCE_START": lambda controls: controls.start,
    "CONTROL_SEQUENCE_END": lambda controls: controls.end,
    "CONTROL_SEQUENCE_READY": lambda controls: True,
}


class _Flag(NamedTuple):
    """A control input of kind START, END or READY. A request gets one of two arrays: one stands for false, one for true."""

    spec: TensorSpec
    asks: Callable[[Controls], bool]
    false: Array
    true: Array

    def array(self, controls: Controls) -> Array:
        return self.true if self.asks(controls) else self.false


class _CorrelationId(NamedTuple):
    """A control input of kind CORRID: the correlation id of a request's sequence."""

    spec: TensorSpec
    shape: tuple[int, ...]
    model: str

    @property
    def false(self) -> Array:
        if self.spec.datatype == "BYTES":
            return np.full(self.shape, b"", np.object_)
        return np.zeros(self.shape, self.spec.dtype)

    def array(self, controls: Controls) -> Array:
        given, datatype = controls.correlation_id, self.spec.datatype
        if datatype == "BYTES":
            if not isinstance(given, str):
                raise self._mixed("UINT64")
            return np.full(self.shape, given.encode(errors="replace"), np.object_)
        if isinstance(given, str):
            text = given.encode(errors="replace")
            if self.spec.dtype.itemsize < 8:
                raise self._mixed("BYTES")
            # Triton's encoding: the first bytes of the text as it is on the wire, its length before it.
            given = int.from_bytes((len(text).to_bytes(4, "little") + text)[:8].ljust(8, b"\0"), "little")
        low = given & ((1 << 8 * self.spec.dtype.itemsize) - 1)
        return np.full(self.shape, low, f"u{self.spec.dtype.itemsize}").view(self.spec.dtype)

    def _mixed(self, given: str) -> InvalidArgument:
        return InvalidArgument(
            f"sequence batching control '{self.spec.name}' data-type is '{given}', "
            f"but model '{self.model}' expects '{self.spec.datatype}'"
        )


class ControlInputs:
    """Makes the control inputs of one model version, which tell the model about the sequence of each request."""

    def __init__(self, flags: list[_Flag], ids: list[_CorrelationId]) -> None:
        self._ids = ids
        made: list[_Flag | _CorrelationId] = [*flags, *ids]
        #: Control inputs by name.
        self.specs: dict[str, TensorSpec] = {each.spec.name: each.spec for each in made}
        #: Arrays for a row that no request fills.
        self.nobody: dict[str, Array] = {each.spec.name: each.false for each in made}
        #: (START, END) -> flag inputs, which all requests share.
        self._flags = {
            (start, end): {flag.spec.name: flag.array(Controls(0, start, end)) for flag in flags}
            for start in (False, True)
            for end in (False, True)
        }

    def arrays(self, controls: Controls) -> dict[str, Array]:
        """Returns the control inputs of a request, by name. Raises InvalidArgument: a datatype cannot hold the sequence's id."""
        return self._flags[controls.start, controls.end] | {each.spec.name: each.array(controls) for each in self._ids}

    def of_each(self, asked: Iterable[Asked]) -> list[dict[str, Array]]:
        """Returns the control inputs of each request, by name. ``asked``: each request's correlation id, START and END.

        The list ends before the first request whose correlation id does not fit the datatype of a control input.
        """
        found: list[dict[str, Array]] = []
        with contextlib.suppress(InvalidArgument):
            for each in asked:
                found.append(self.arrays(Controls(*each)))
        return found


def control_inputs(config: ModelConfig) -> ControlInputs:
    """Returns the control inputs that a checked configuration declares."""
    kinds = model_config_pb2.ModelSequenceBatching.Control.Kind
    shape = (1, 1) if config.max_batch_size > 0 else (1,)
    flags: list[_Flag] = []
    ids: list[_CorrelationId] = []
    for tensor in config.sequence_batching.control_input:
        for control in tensor.control:
            kind = kinds.Name(control.kind)
            if kind == "CONTROL_SEQUENCE_CORRID":
                datatype = datatypes.from_model_config(data_type_name(control))
                ids.append(_CorrelationId(_spec(tensor.name, datatype), shape, config.name))
                continue
            field = next(name for name in _DATATYPES if len(getattr(control, name)))
            spec = _spec(tensor.name, _DATATYPES[field])
            false, true = (_constant(shape, spec, value) for value in getattr(control, field))
            flags.append(_Flag(spec, _ASKS[kind], false, true))
    return ControlInputs(flags, ids)


def _spec(name: str, datatype: str) -> TensorSpec:
    return TensorSpec(name, datatype, DTYPES[datatype], (1,), (1,), (None,))


def _constant(shape: tuple[int, ...], spec: TensorSpec, value: Any) -> Array:
    made: Array = np.full(shape, value, spec.dtype)
    # All requests share the array.
    made.flags.writeable = False
    return made


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What one model version's configuration says about sequences: limits, control inputs, and how instances batch them."""

    rules: SequenceRules
    controls: ControlInputs
    #: Strategy "direct": the row of a sequence in a batch is the number of its slot.
    direct: bool
    #: Makes the strategy of one instance.
    strategy: Callable[[], Strategy[Any]]
    #: Gives out ids, of a model that may send requests round again.
    iterative: IterativeIds | None


def sequence_plan(config: ModelConfig, max_waiting: int) -> SequencePlan | None:
    """Returns the plan for a model's sequences, or None if the model's configuration has no ``sequence_batching``.

    ``config``: the model's configuration with defaults filled in. ``max_waiting``: how many of the model's requests may wait.
    """
    if not config.HasField("sequence_batching"):
        return None
    sequences, rows = config.sequence_batching, max(1, config.max_batch_size)
    direct = not sequences.HasField("oldest")
    slots = rows if direct else sequences.oldest.max_candidate_sequences or rows
    rules = SequenceRules(
        slots, sequences.max_sequence_idle_microseconds * 1000, max_waiting, bool(sequences.iterative_sequence)
    )
    iterative = IterativeIds() if rules.iterative else None
    if direct:
        # Rounded, because the utilization is a 32-bit float: 0.1 of ten slots is one.
        enough = math.ceil(round(sequences.direct.minimum_slot_utilization * slots, 4))
        direct_rules = DirectRules(slots, sequences.direct.max_queue_delay_microseconds * 1000, enough)
        return SequencePlan(rules, control_inputs(config), direct, lambda: DirectBatcher(direct_rules), iterative)
    preferred = tuple(sorted(set(sequences.oldest.preferred_batch_size)))
    batching = BatchRules(
        rows, sequences.oldest.max_queue_delay_microseconds * 1000, preferred, joins=config.max_batch_size > 0
    )
    return SequencePlan(rules, control_inputs(config), direct, lambda: OldestBatcher(batching), iterative)


class MadeInputs:
    """The inputs that the worker adds to each request of one model version: control inputs, and properties of the request."""

    def __init__(self, controls: ControlInputs | None = None, asked: RequestInputs | None = None) -> None:
        #: Control inputs, of a model with sequences.
        self.controls = controls
        #: Properties of requests that model.py asks for.
        self.asked = asked
        parts = [part for part in (controls, asked) if part is not None]
        #: Such inputs by name.
        self.specs: Mapping[str, TensorSpec] = {name: spec for part in parts for name, spec in part.specs.items()}
        #: Arrays for a row that no request fills.
        self.nobody: Mapping[str, Array] = {name: array for part in parts for name, array in part.nobody.items()}

    def arrays(self, request: RequestTensors, record: RequestRecord) -> dict[str, Array]:
        """Returns the inputs that the worker adds to a request, by name: control inputs, and properties of the request.

        Raises InvalidArgument if a property is missing or has a wrong type or value. Raises InvalidArgument if the datatype of
        a control input cannot hold the id of the request's sequence.
        """
        made: dict[str, Array] = {}
        if self.controls is not None:
            made = self.controls.arrays(request.controls)
        if self.asked is not None:
            made |= self.asked.arrays(request.prepared, record, request.rows)
        return made

    def __bool__(self) -> bool:
        return bool(self.specs)

    def __repr__(self) -> str:
        return f"<MadeInputs {', '.join(self.specs)}>"
