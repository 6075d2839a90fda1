"""Records the timeline of a traced request in its worker: timestamps, and spans that the model's code opens.

At trace level TENSORS the timeline also has the request's inputs and outputs. Source: Triton docs/user_guide/trace.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tensord.shm import trace_stamps
from tensord.shm.arrays import Array, datatype_of
from tensord.shm.errors import ServingError
from tensord.shm.messages import (
    TIMING,
    AnswerRecord,
    OwnSpan,
    Parameter,
    RequestRecord,
    Timeline,
    TraceContext,
    TracedTensor,
)
from tensord.shm.record import encoder
from tensord.shm.tracer import without_tensors
from tensord.workers.requests.result import Result

#: Bits of ``RequestRecord.trace``.
TIMESTAMPS, TENSORS = 1, 2
#: Elements of a tensor that are written out, and bytes of one element.
_MAX_ELEMENTS = 16384
_MAX_ELEMENT = 4096
#: Requests made for one that are told with it, with theirs in turn, and characters of all their tensors: no more are told.
_MAX_CHILDREN = 1024
_MAX_CHARACTERS = 1 << 20
#: Bytes of an encoded timeline without moments up to them: its length, its tag, no moments.
_UP_TO_MOMENTS = 1 + 3 + 1
#: Spans of a model's code that are told of one request.
MAX_SPANS = 128


@dataclass(slots=True, eq=False)
class Span:
    """A tracing span: a named part of a model's work on one or more requests. The model's code begins and ends the span."""

    name: str
    attributes: dict[str, Parameter]
    parent: Span | None
    began_ns: int = field(default_factory=time.monotonic_ns)
    #: 0: it is open.
    ended_ns: int = 0
    error: str = ""

    def end(self, error: BaseException | None = None) -> None:
        """Ends the span. ``error``: the exception that ended the span's block; None: the block ended without one."""
        self.error = "" if error is None else type(error).__name__
        self.ended_ns = time.monotonic_ns()


class RequestTimeline:
    """The timeline of one traced request: timestamps, tensors, spans, and the timelines of requests made on its behalf."""

    __slots__ = (
        *("_characters", "_children", "_count", "_moments", "_spans", "_tensors", "_within"),
        *("attaches", "context", "level", "parameters"),
    )

    def __init__(self, level: int, queued_ns: int) -> None:
        #: The trace level for ``RequestRecord.trace`` of requests that are made for this one.
        self.level = level
        #: True if its submitter gets it with the answer; of a client's request the worker itself makes the trace.
        self.attaches = True
        #: Name and number of the pushed parameter set that it was computed with, if it was.
        self.parameters: tuple[str, int] | None = None
        self._moments = [(trace_stamps.QUEUE_START, queued_ns)]
        self._tensors: list[TracedTensor] = []
        self._children: list[Timeline] = []
        #: The span of the model's code in which each of them was made; None: in none.
        self._within: list[Span | None] = []
        #: The spans that the model's code has named, in whatever threads.
        self._spans: list[Span] = []
        #: The trace that the request belongs to; None: its submitter has not said so.
        self.context: TraceContext | None = None
        #: The number of the children and of theirs, and of the characters in what their tensors say.
        self._count = self._characters = 0

    def within(self, current: Span | None) -> Span | None:
        """Returns the parent for the request's next span, or None if the request has no open span.

        The parent is ``current``, the caller's innermost span, if ``current`` is open and belongs to the request. Otherwise the
        parent is the request's newest open span.
        """
        if current is not None and not current.ended_ns and current in self._spans:
            return current
        return next((span for span in reversed(self._spans) if not span.ended_ns), None)

    def open(self, span: Span) -> bool:
        """Adds a span of the model's code. Returns False, and adds nothing, if there are too many. Any thread may call it."""
        if len(self._spans) >= MAX_SPANS:
            return False
        self._spans.append(span)
        return True

    def executed(self, moments: Sequence[int], inputs: dict[str, Array], result: Result) -> None:
        """Adds a run of the request to the timeline. At the trace level TENSORS also adds inputs and outputs (``result``).

        ``moments``: when the run began, when it had its inputs, and when it had its outputs, in ns.
        """
        names = (trace_stamps.COMPUTE_START, trace_stamps.COMPUTE_INPUT_END, trace_stamps.COMPUTE_OUTPUT_START)
        self._moments += zip(names, moments, strict=True)
        if self.level & TENSORS:
            outputs = {} if isinstance(result, ServingError) else result
            for activity, arrays in (("TENSOR_QUEUE_INPUT", inputs), ("TENSOR_BACKEND_OUTPUT", outputs)):
                self._tensors += [_described(activity, name, array) for name, array in arrays.items()]

    def responded(self, now_ns: int) -> None:
        """Adds the time of the first response. Later calls do nothing."""
        if trace_stamps.RESPONSE_START not in dict(self._moments):
            self._moments.append((trace_stamps.RESPONSE_START, now_ns))

    def attach(self, answer: AnswerRecord) -> AnswerRecord:
        """Ends the timeline now. Returns the answer with the timeline, or unchanged if the request came over a client's lane."""
        return msgspec.structs.replace(answer, trace=self.told()) if self.attaches else answer

    def add(self, model: str, version: int, child: RequestTimeline, within: Span | None = None) -> None:
        """Adds ``child``, the timeline of an inner request that a model or an ensemble's step made on behalf of this request.

        The inner request has ended. ``model``, ``version``: name and version number of the model that ran the inner request.
        ``within``: the span in which the inner request was made; None: the inner request was made in no span.
        """
        self._count += 1 + child._count
        if self._count > _MAX_CHILDREN:
            return
        child._moments.insert(0, (trace_stamps.REQUEST_START, child._moments[0][1]))
        made = child.told()
        characters = child._characters + sum(len(tensor.content) for tensor in made.tensors)
        if self._characters + characters > _MAX_CHARACTERS:
            made = without_tensors(made)
        else:
            self._characters += characters
        moments = made.moments and (*made.moments, (trace_stamps.REQUEST_END, time.monotonic_ns()))
        self._children.append(msgspec.structs.replace(made, moments=moments, model=model, version=version))
        self._within.append(within)

    def told(self) -> Timeline:
        """Returns the timeline as a ``Timeline`` record. If the model is computing, COMPUTE_END is the time of this call."""
        ran = any(name == trace_stamps.COMPUTE_START for name, _ in self._moments)
        moments = [*self._moments, (trace_stamps.COMPUTE_END, time.monotonic_ns())] if ran else self._moments
        stamps = tuple(moments) if self.level & TIMESTAMPS else ()
        return Timeline(
            stamps,
            tuple(self._tensors),
            children=tuple(self._children),
            parameters=self.parameters,
            spans=_closed(self._spans, self._within) if self._spans else (),
        )


def begun(record: RequestRecord, context: TraceContext | None, queued_ns: int) -> RequestTimeline:
    """Makes the timeline of the traced request that ``record`` describes. The request was queued at ``queued_ns``.

    The timeline belongs to the client's trace ``context`` if ``context.request_id`` is the request's id, and else to no trace.
    """
    timeline = RequestTimeline(record.trace & ~TIMING, queued_ns)
    if context is not None and context.request_id == record.request_id:
        timeline.context = context
    return timeline


def timeline_end(parameters: tuple[str, int] | None) -> bytes:
    """Returns the last bytes of an encoded ``Timeline``, which follow the timestamps and contain the parameter set.

    ``parameters``: name and number of the pushed parameter set that the request used, or None if the request used none.
    """
    return encoder.encode(Timeline((), parameters=parameters))[_UP_TO_MOMENTS:]


def _closed(spans: Iterable[Span], within: Sequence[Span | None]) -> tuple[OwnSpan, ...]:
    now_ns = time.monotonic_ns()
    numbers: dict[Span, int] = {}
    told: list[OwnSpan] = []
    for number, span in enumerate(list(spans), 1):
        numbers[span] = number
        parent = 0 if span.parent is None else numbers.get(span.parent, 0)
        calls = tuple([place for place, each in enumerate(within) if each is span])
        ended_ns = span.ended_ns or now_ns
        told.append(OwnSpan(span.name, span.began_ns, ended_ns, span.attributes, parent, span.error, calls))
    return tuple(told)


def trace_id_of(timelines: Iterable[RequestTimeline | None]) -> str:
    """Returns the ids of the traces of these requests, comma-separated, for a log line; "": none is traced."""
    found = {each.context.trace_id for each in timelines if each is not None and each.context is not None}
    return ",".join(sorted(found))


def _described(activity: str, name: str, array: Array) -> TracedTensor:
    datatype = datatype_of(array.dtype) or ""
    try:
        # It may lie on a GPU.
        elements = np.asarray(array).ravel()
    except ServingError:  # or have lain there: what becomes of the request does not depend on its trace
        return TracedTensor(activity, name, datatype, array.shape, "", True)
    content = ",".join(map(_text, elements[:_MAX_ELEMENTS].tolist()))
    return TracedTensor(activity, name, datatype, array.shape, content, elements.size > _MAX_ELEMENTS)


def _text(element: object) -> str:
    if isinstance(element, bytes):
        return f'"{element[:_MAX_ELEMENT].decode("utf-8", "replace")}"'
    # A server in C++ writes booleans as numbers.
    return str(int(element)) if isinstance(element, bool) else str(element)
