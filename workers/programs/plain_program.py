"""Recognises "plain" programs, which may safely write their outputs to memory that a client shares.

The client can read and change the memory of an output at any moment, even during a run. In a plain program no value decides
what is read, written or run, for example as an index or in a sort. So a client that changes the memory spoils only its own
numbers. XLA may use an output's memory also for intermediate results, which may reveal a model's parameters to the client.
Programs where XLA does so are not plain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from google.protobuf import empty_pb2, unknown_fields

#: XLA's operations that take no index, count or condition from a tensor; computations that they call are in the program's text.
_PLAIN = frozenset(
    re.findall(
        r"\S+",
        """
        abs add and atan2 bitcast bitcast-convert broadcast call cbrt ceil clamp compare complex concatenate constant
        convert convolution copy cosine count-leading-zeros divide dot erf exponential exponential-minus-one floor fusion
        get-tuple-element imag iota is-finite log log-plus-one logistic map maximum minimum multiply negate not or pad
        parameter popcnt power real reduce reduce-precision reduce-window remainder reshape reverse round-nearest-afz
        round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine slice sqrt subtract
        tan tanh transpose tuple xor
        """,
    )
)
#: An instruction: a name, the type of its result, the operation. Every indented line is one.
_INSTRUCTION = re.compile(r" +(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\(")
#: Fields of XLA's BufferAssignmentProto and BufferAllocationProto (xla/service/hlo.proto).
_ALLOCATIONS, _LIVE_OUT, _ASSIGNED = 3, 7, 9


def is_plain(compiled: Any) -> bool:
    """Returns True if a client that can access a program's outputs during the run can do no more than spoil these outputs."""
    try:
        text = compiled.as_text()
        assignment = compiled.runtime_executable().get_compiled_memory_stats().serialized_buffer_assignment_proto
        return _only_computes(text or "") and _leaves_only_outputs(assignment or b"")
    except Exception:  # not every back end says as much, and another jaxlib may say it otherwise
        return False


def _only_computes(text: str) -> bool:
    found = [_INSTRUCTION.match(line) for line in text.split("\n") if line.startswith(" ")]
    return bool(found) and all(one is not None and one[1] in _PLAIN for one in found)


def _leaves_only_outputs(assignment: bytes) -> bool:
    """Returns whether XLA uses the memory of a program's outputs for nothing else. ``assignment``: XLA's memory plan."""
    outputs = 0
    for number, allocation in _fields(assignment):
        if number == _ALLOCATIONS:
            numbers = [field for field, _ in _fields(allocation)]
            outputs += _LIVE_OUT in numbers
            if _LIVE_OUT in numbers and numbers.count(_ASSIGNED) != 1:
                return False
    return outputs > 0


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """Yields the number and content of each field of any protobuf message."""
    fields: Any = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
    for field in fields:
        yield field.field_number, field.data
