"""Decides which requests are traced, and collects the timestamps and tensors of traced requests.

    Tracer.sample makes a Trace of a request ─▶ the Trace collects timestamps and tensors ─▶ Trace.end writes the Trace

Fronts trace their clients' requests, and workers trace the requests on clients' lanes. Times are in ns of CLOCK_MONOTONIC. If
the daemon has an OpenTelemetry collector, ended traces are also sent to the daemon's main process, which makes spans of them.
Source of the names and the JSON: Triton docs/user_guide/trace.md.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from tensord.shm import trace_stamps
from tensord.shm.common.scheduling import sampled
from tensord.shm.control_records import EndedTrace, TraceChanged, TraceCleared, TracesEnded
from tensord.shm.durations import COMPUTE, FIRST_RESPONSE, QUEUE, REQUEST
from tensord.shm.messages import RequestRecord, Timeline
from tensord.shm.seldom import Seldom
from tensord.shm.trace_counters import Passes, SampleCounter, TraceBudget
from tensord.shm.trace_file import TraceFiles

_log = logging.getLogger(__name__)
#: Traces that are handed over together, and seconds after which fewer are.
_TOGETHER = 64
_SECONDS = 0.5
#: Has a function called in so many seconds.
Later = Callable[[float, Callable[[], None]], None]
#: Model versions that have exemplars; the one that was traced longest ago makes room.
MAX_EXEMPLARS = 1024
#: The kind of a duration -> the stamps at its two ends.
_ENDS = (
    (REQUEST, trace_stamps.REQUEST_START, trace_stamps.COMPUTE_END),
    (QUEUE, trace_stamps.REQUEST_START, trace_stamps.COMPUTE_START),
    (COMPUTE, trace_stamps.COMPUTE_START, trace_stamps.COMPUTE_END),
    (FIRST_RESPONSE, trace_stamps.REQUEST_START, trace_stamps.RESPONSE_START),
)
#: The bit of ``RequestRecord.trace`` that asks for timestamps.
_TIMESTAMPS = 1
#: Trace ids are unique among the fronts of a daemon: the upper bits are the front's incarnation.
_ID_BITS = 32
_UNTOLD = Timeline(())
#: Protocol -> its code of an answer with outputs.
_GOOD = {"http": "200", "grpc": "OK", "lane": "OK"}


class Exemplars:
    """The exemplars, as OpenMetrics calls them, that a front stores for its histograms of request durations.

    For each model version, kind of duration and bucket, the exemplar is the last traced request whose duration is in the
    bucket. ``buckets``: the buckets' upper bounds in seconds.
    """

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        #: Model and version -> kind of duration and number of the bucket -> trace id, seconds, and seconds since 1970.
        self._versions: dict[tuple[str, int], dict[tuple[int, int], tuple[str, float, float]]] = {}

    def note(self, model: str, version: int, trace_id: str, moments: Mapping[str, int]) -> None:
        """Makes a request the exemplar of the bucket of each of its durations. ``moments``: its timestamps in ns, by name."""
        found = self._versions.pop((model, version), {})
        while len(self._versions) >= MAX_EXEMPLARS:
            del self._versions[next(iter(self._versions))]
        self._versions[model, version] = found
        now = time.time()
        for kind, begins, ends in _ENDS:
            if begins in moments and ends in moments:
                seconds = max(0, moments[ends] - moments[begins]) / 1e9
                found[kind, bisect_left(self._buckets, seconds)] = trace_id, seconds, now

    def told(self) -> list[tuple[str, int, list[tuple[int, int, str, float, float]]]]:
        """Returns all exemplars: (model, version, [(kind, bucket, trace_id, seconds, stored), ...]) for each model version.

        ``kind`` is the index of a kind of duration in ``durations.KINDS``. ``bucket`` is the index of a histogram bucket.
        ``seconds`` is the traced request's duration of this kind. ``stored`` is when it was measured, in seconds since 1970.
        """
        return [
            (model, version, [(*bucket, *exemplar) for bucket, exemplar in found.items()])
            for (model, version), found in self._versions.items()
        ]


class SpanIds(NamedTuple):
    """A trace id and a span id, in hexadecimal digits as in W3C Trace Context."""

    trace_id: str
    span_id: str

    @classmethod
    def within(cls, parent: SpanIds | None) -> SpanIds:
        """Makes the ids of a new span inside ``parent``. The span begins a new trace if ``parent`` is None."""
        trace_id = f"{random.getrandbits(128) or 1:032x}" if parent is None else parent.trace_id
        return cls(trace_id, f"{random.getrandbits(64) or 1:016x}")


class Spans:
    """Collects the traces of ended requests, and sends several at a time to the daemon's main process. Not thread-safe."""

    def __init__(self, hand_over: Callable[[TracesEnded], bool], later: Later | None = None) -> None:
        """Starts without traces. ``hand_over`` sends traces to the daemon's main process, or returns False if it cannot.

        ``later`` calls a function after a number of seconds. If it is None, the running event loop does so.
        """
        self._hand_over = hand_over
        self._later = later or _in_loop
        self._waiting: list[EndedTrace] = []
        #: True if a flush is due.
        self._due = False
        #: Traces that were dropped so far.
        self.dropped = 0
        self._seldom = Seldom()

    def ended(self, trace: EndedTrace) -> None:
        """Queues the trace of an ended request, to be sent to the daemon's main process within half a second."""
        self._waiting.append(trace)
        if len(self._waiting) >= _TOGETHER:
            self.flush()
        elif not self._due:
            self._due = True
            self._later(_SECONDS, self._flush_due)

    def _flush_due(self) -> None:
        self._due = False
        self.flush()

    def flush(self) -> None:
        """Sends all collected traces to the daemon's main process. Drops the traces if they cannot be sent."""
        if not self._waiting:
            return
        traces, self._waiting = tuple(self._waiting), []
        if not self._hand_over(TracesEnded(traces)):
            self.dropped += len(traces)
            if self._seldom.is_due():
                _log.warning("the supervisor does not take traces: %d were dropped so far", self.dropped)


def _in_loop(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


def without_tensors(timeline: Timeline) -> Timeline:
    """Returns ``timeline`` with all tensors left out, also those of nested timelines. The argument itself is not changed."""
    if timeline.tensors or timeline.children:
        children = tuple(map(without_tensors, timeline.children))
        return msgspec.structs.replace(timeline, tensors=(), children=children)
    return timeline


class Tracer:
    """Decides which of a process's requests are traced, and makes their ``Trace`` objects."""

    def __init__(
        self,
        incarnation: int,
        files: TraceFiles,
        buckets: Sequence[float] = (),
        hand_over: Callable[[TracesEnded], bool] | None = None,
        protocol: str = "http",
        later: Later | None = None,
    ) -> None:
        """Makes a tracer that samples no requests until its method ``changed`` is called with trace settings.

        Args:
          incarnation: a number that no other process of this daemon has. It becomes the upper bits of trace ids.
          files: writes traces to files. The tracer's ``close`` closes ``files``.
          buckets: upper bounds in seconds of a duration histogram's buckets. The last traced request of each bucket is stored.
          hand_over: sends traces to the daemon's main process. Returns False if they cannot be sent. If it is None, the
            daemon has no OpenTelemetry collector.
          protocol: "http", "grpc" or "lane".
          later: calls a function after a number of seconds. If it is None, the running event loop does so.
        """
        #: Traced requests that stand for buckets.
        self.exemplars = Exemplars(buckets)
        self._spans = None if hand_over is None else Spans(hand_over, later)
        #: True if a request is traced whose ``traceparent`` says that its sender traces it.
        self.joins = self._spans is not None
        #: True if any request may be sampled at all.
        self.on = self.joins
        self._protocol = protocol
        #: Counts the requests that need not be ``sample``d: while any are left, one without a ``traceparent`` takes one off.
        self.passes = Passes()
        self._samplers: dict[str, Sampler] = {}
        self._files = files
        self._last_id = incarnation << _ID_BITS

    def changed(self, record: TraceChanged, fds: list[int]) -> None:
        """Applies the trace settings in ``record``. Takes ownership of ``fds``, the descriptors that came with the record."""
        self._forget(record.model)
        self._samplers[record.model] = Sampler(record, fds, self._files)
        self._look()

    def cleared(self, record: TraceCleared) -> None:
        """Removes the trace settings of the model ``record.model``. The settings for all models then hold for that model."""
        self._forget(record.model)
        self._look()

    def _forget(self, model: str) -> None:
        former = self._samplers.pop(model, None)
        if former is not None:
            former.close()

    def _look(self) -> None:
        turns = [sampler.turn for sampler in self._samplers.values() if sampler.turn is not None]
        self.on = self.joins or any(sampler.level for sampler in self._samplers.values())
        if not turns:
            self.passes = Passes()
        elif len(self._samplers) == 1 and "" in self._samplers:
            self.passes = turns[0]
        else:
            # Which requests pass depends on their models.
            self.passes = Passes(0)

    def sample(self, model: str, traceparent: str = "", began_ns: int = 0) -> Trace | None:
        """Decides whether to trace a request. If so, returns a trace that the caller must fill and end. Otherwise returns None.

        Args:
          model: the model that the request is for.
          traceparent: the W3C header that the client sent, or "". If the daemon has an OpenTelemetry collector and the
            header asks for a trace, the request is traced whatever level, rate and count are set.
          began_ns: when the request began to arrive, in ns of CLOCK_MONOTONIC, or 0 for now.
        """
        sampler = self._samplers.get(model) or self._samplers.get("")
        if sampler is None:
            return None
        ids = sampled(traceparent) if traceparent and self._spans is not None else None
        parent = ids and SpanIds(*ids)
        if parent is None and not sampler.hit():
            return None
        trace = Trace(self._next_id, sampler, model, self.exemplars, self._protocol)
        if self._spans is not None:
            trace.join(self._spans, parent, began_ns or time.monotonic_ns())
        return trace

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def close(self) -> None:
        """Stops sampling requests. Writes and sends the ended traces that are still buffered. Waits at most two seconds."""
        for model in list(self._samplers):
            self._forget(model)
        self.on = self.joins = False
        self.passes = Passes()
        self._files.close()
        if self._spans is not None:
            self._spans.flush()


class Sampler:
    """The trace settings of one model, or of all models. It decides which requests are traced, and writes traces to a file."""

    def __init__(self, settings: TraceChanged, fds: list[int], files: TraceFiles) -> None:
        """Takes ownership of ``fds``, eventfds that all fronts and workers share. If there are none, ``hit`` returns False.

        The first eventfd counts requests, to select some for tracing. The second one, if there is one, counts the traces that
        are still allowed.
        """
        self.level = settings.level
        #: None: ``hit`` returns False.
        self.turn = SampleCounter(fds[0], settings.rate) if fds else None
        self._budget = TraceBudget(fds[1]) if len(fds) > 1 else None
        self._log_frequency = settings.log_frequency
        self._path = settings.file
        self._files = files
        #: Traces that wait until there are ``log_frequency`` of them.
        self._collected: list[bytes] = []
        self._closed = False

    def hit(self) -> bool:
        """Counts one request in the counters that all fronts and workers share. Returns whether to trace the request."""
        if self.turn is None:
            return False
        return self.turn.take() and (self._budget is None or self._budget.take())

    @property
    def writes(self) -> bool:
        """Returns whether traces are written to a file."""
        return bool(self._path and self.level)

    def write(self, trace: bytes) -> None:
        """Writes a trace, or keeps it until there are ``log_frequency`` traces to write together. ``writes`` must be True."""
        if not self._log_frequency:
            self._files.write(self._path, trace, indexed=False)
            return
        self._collected.append(trace)
        if len(self._collected) >= self._log_frequency or self._closed:
            self._flush()

    def _flush(self) -> None:
        if self._collected:
            self._files.write(self._path, b",".join(self._collected), indexed=True)
            self._collected = []

    def close(self) -> None:
        """Writes all traces that ``write`` has kept, and closes this object's eventfds. Later, ``write`` keeps no traces."""
        self._closed = True
        self._flush()
        for counter in (self.turn, self._budget):
            if counter is not None:
                counter.close()


class Trace:
    """Collects the trace of one request, and writes it when the request has ended."""

    def __init__(
        self, next_id: Callable[[], int], sampler: Sampler, model: str, exemplars: Exemplars, protocol: str
    ) -> None:
        self._exemplars = exemplars
        self._protocol = protocol
        self._spans: Spans | None = None
        #: Where it is sent to a collector: the client's span, and when the request began.
        self._parent: SpanIds | None = None
        self._began_ns = 0
        self._next_id = next_id
        self._id = next_id()
        self._sampler = sampler
        self._model = model
        self._version = -1
        self._stamps: list[tuple[int, str]] = []
        #: The part of the trace that the worker has reported, or None.
        self._timeline: Timeline | None = None
        #: Ids of the trace and of the request's span there, in hexadecimal digits; else its number in its file, and "".
        self.context: tuple[str, str] = (str(self._id), "")
        #: The request's ``id``, once it is known.
        self.client_id = ""
        #: The record in which it was sent to a worker; None: it was not.
        self._record: RequestRecord | None = None
        #: The protocol's code of the answer, and its error; "": it was answered with outputs.
        self.code = _GOOD[protocol]
        self.error = ""

    def join(self, spans: Spans, parent: SpanIds | None, began_ns: int) -> None:
        """Makes the request a span of a distributed trace. ``end`` adds the span to ``spans``.

        ``parent`` is the client's span. If it is None, a new trace begins. ``began_ns`` is when the request began to arrive, in
        ns of CLOCK_MONOTONIC.
        """
        self._spans, self._parent, self._began_ns = spans, parent, began_ns
        self.context = SpanIds.within(parent)

    @property
    def level(self) -> int:
        """Returns what is traced of the request: 1 for timestamps, 2 for tensors, 3 for timestamps and tensors."""
        return self._sampler.level or _TIMESTAMPS

    def stamp(self, name: str, ns: int = 0) -> None:
        """Adds a timestamp. ``ns`` is its time in ns of CLOCK_MONOTONIC, or 0 for now."""
        self._stamps.append((ns or time.monotonic_ns(), name))

    def sent(self, record: RequestRecord, ns: int = 0) -> None:
        """Stores that the request is sent to a worker as ``record``. ``ns``: when, in ns of CLOCK_MONOTONIC, or 0 for now."""
        self.client_id, self._record = record.client_id, record
        self.stamp(trace_stamps.REQUEST_START, ns)

    def failed(self, code: str, error: str) -> None:
        """Stores the error that the request is answered with. ``code`` is the protocol's code, such as "400" or "NOT_FOUND"."""
        self.code, self.error = code, error

    def responded(self, version: int) -> None:
        """Stores the number of the model version that sent a response, unless ``version`` is 0.

        Call ``completed`` instead for the last response.
        """
        self._version = version or self._version

    def completed(self, version: int, timeline: Timeline | None) -> None:
        """Adds the worker's timestamps, and a timestamp for the end of the request.

        ``version`` is the model version that answered, or 0 if none did. ``timeline`` is what the worker reported, or None.
        """
        self._version = version or self._version
        if timeline is not None:
            self._stamps += [(ns, name) for name, ns in timeline.moments]
            self._timeline = timeline
        self.stamp(trace_stamps.REQUEST_END)

    def end(self) -> None:
        """Ends the trace. Writes it if the settings name a file and a level. Queues it for a collector, if there is one."""
        timeline = self._timeline or _UNTOLD
        if self._sampler.writes:
            entries = self._head(self._id, self._model, self._version, timeline.parameters)
            entries += self._stamped(self._id, [*self._stamps, *_ends(timeline)])
            entries += _tensors(self._id, timeline)
            for child in timeline.children:
                entries += self._of_child(child, self._id)
            self._sampler.write(b",".join(map(msgspec.json.encode, entries)))
        moments = tuple([(name, ns) for ns, name in self._stamps])
        if not self.error and self._version > 0:
            self._exemplars.note(self._model, self._version, self.context[0], dict(moments))
        if self._spans is not None:
            said: dict[str, str | int | bool] = {"model": self._model, "protocol": self._protocol, "code": self.code}
            if self._version > 0:
                said["version"] = self._version
            if self.client_id:
                said["request_id"] = self.client_id
            record = self._record
            if record is not None and record.sequence_id:
                said |= {"sequence_id": record.sequence_id}
                said |= {"sequence_start": record.sequence_start, "sequence_end": record.sequence_end}
            told = None if self._timeline is None else without_tensors(self._timeline)
            parent_id = "" if self._parent is None else self._parent.span_id
            self._spans.ended(
                EndedTrace(*self.context, parent_id, self._began_ns, moments, self._model, said, told, self.error)
            )

    def _of_child(self, child: Timeline, parent_id: int) -> list[dict[str, Any]]:
        number = self._next_id()
        entries = self._head(number, child.model, child.version, child.parameters)
        entries[0]["parent_id"] = parent_id
        entries += self._stamped(number, [*((ns, name) for name, ns in child.moments), *_ends(child)])
        entries += _tensors(number, child)
        for own in child.children:
            entries += self._of_child(own, number)
        return entries

    def _head(self, number: int, model: str, version: int, parameters: tuple[str, int] | None) -> list[dict[str, Any]]:
        head: dict[str, Any] = {"id": number, "model_name": model, "model_version": version}
        if parameters is not None:
            head["parameter_set"], head["parameter_version"] = parameters
        return [head | {"request_id": self.client_id} if self.client_id else head]

    def _stamped(self, number: int, stamps: list[tuple[int, str]]) -> list[dict[str, Any]]:
        if not self.level & _TIMESTAMPS:
            return []
        return [
            {"id": number, "timestamps": [{"name": name, "ns": ns}]} for ns, name in sorted(stamps, key=itemgetter(0))
        ]


def _ends(timeline: Timeline) -> list[tuple[int, str]]:
    """Returns two timestamps, (ns, name_START) and (ns, name_END), for each span that the model's code has made."""
    return [
        end
        for span in timeline.spans
        for end in ((span.began_ns, f"{span.name}_START"), (span.ended_ns, f"{span.name}_END"))
    ]


def _tensors(number: int, timeline: Timeline) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for tensor in timeline.tensors:
        entry: dict[str, Any] = {
            "name": tensor.name,
            "data": tensor.content,
            "shape": ",".join(map(str, tensor.shape)),
            "dtype": tensor.datatype,
        }
        if tensor.truncated:
            entry["truncated"] = True
        entries.append({"id": number, "activity": tensor.activity, "tensor": entry})
    return entries
