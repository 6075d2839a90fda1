"""What a sampled request met in the worker: when it was where, and with level TENSORS what went in and came out, as text.

Requests that are not sampled have none. Source: Triton docs/user_guide/trace.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from shm.arrays import Array, datatype_of
from shm.errors import ServingError
from shm.messages import Completion, Timeline, TracedTensor
from workers.requests.result import Result

#: Bits of ``Submit.trace``.
TIMESTAMPS, TENSORS = 1, 2
#: Elements of a tensor that are written out, and bytes of one element.
_MAX_ELEMENTS = 16384
_MAX_ELEMENT = 4096


class RequestTimeline:
    """Belongs to a request."""

    __slots__ = ("_level", "_moments", "_tensors")

    def __init__(self, level: int, queued_ns: int) -> None:
        self._level = level
        self._moments = [("QUEUE_START", queued_ns)]
        self._tensors: list[TracedTensor] = []

    def executed(self, moments: Sequence[int], inputs: dict[str, Array], result: Result) -> None:
        """The model ran; its outputs are not placed yet. ``moments``: it began, had its inputs, had computed; in ns."""
        self._moments += zip(("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"), moments, strict=True)
        if self._level & TENSORS:
            outputs = {} if isinstance(result, ServingError) else result
            for activity, arrays in (("TENSOR_QUEUE_INPUT", inputs), ("TENSOR_BACKEND_OUTPUT", outputs)):
                self._tensors += [_described(activity, name, array) for name, array in arrays.items()]

    def attach(self, completion: Completion) -> Completion:
        """The answer is placed: it takes all of this along."""
        moments = [*self._moments, ("COMPUTE_END", time.monotonic_ns())] if len(self._moments) > 1 else self._moments
        timeline = Timeline(tuple(moments) if self._level & TIMESTAMPS else (), tuple(self._tensors))
        return msgspec.structs.replace(completion, trace=timeline)


def _described(activity: str, name: str, array: Array) -> TracedTensor:
    content = ",".join(map(_text, array.ravel()[:_MAX_ELEMENTS].tolist()))
    truncated = array.size > _MAX_ELEMENTS
    return TracedTensor(activity, name, datatype_of(array.dtype) or "", array.shape, content, truncated)


def _text(element: object) -> str:
    if isinstance(element, bytes):
        return f'"{element[:_MAX_ELEMENT].decode("utf-8", "replace")}"'
    # A server in C++ writes booleans as numbers.
    return str(int(element)) if isinstance(element, bool) else str(element)
