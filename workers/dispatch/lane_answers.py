"""Counts the final answers on clients' lanes by error code, logs and traces some of them, and keeps the last errors.

The worker's C extension answers some requests on lanes without Python, and counts these answers itself. ``LaneAnswers`` tells
the extension how many requests it may answer before Python must log or trace a request.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from tensord.config.options import TraceOptions
from tensord.shm.access_log import MAX_TEXT, AccessLog
from tensord.shm.channel import Channel, ChannelClosed
from tensord.shm.control_records import TraceChanged, TraceCleared, TracesEnded
from tensord.shm.errors import Cancelled, InvalidArgument, ServingError
from tensord.shm.messages import TIMING, RequestRecord, TraceContext
from tensord.shm.trace_file import TraceFiles
from tensord.shm.tracer import Tracer
from tensord.workers.dispatch.poller import Poller
from tensord.workers.models.model_version import AgendaPart
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.scheduling.agenda import Agenda

#: The last errors that are kept.
_MAX_RECENT = 100
#: Records that may wait for the supervisor while ended traces are sent to it.
_MAX_WAITING = 1024
#: More requests than ever pass.
_ENDLESS = 1 << 62


class LaneAnswers:
    """Counts, logs and traces the final answers to clients that have a lane. Answers to fronts are ignored."""

    def __init__(self) -> None:
        #: Answers by error code, "OK" for success; answers of the C part are not counted here.
        self.counts: Counter[str] = Counter()
        #: Answers of the C part, all of them good, as of the last ``passed``.
        self._passed = 0
        self._recent: deque[dict[str, Any]] = deque(maxlen=_MAX_RECENT)
        self._log = AccessLog("lane")
        self.tracer = Tracer(0, TraceFiles(), protocol="lane")
        #: True if the C part has to be told how many requests may pass, and to say how many did.
        self.watched = False
        self._poller: Poller
        self._channel: Channel | None = None

    def begin(self, poller: Poller, access: int) -> None:
        """Starts to log and count the answers that the C code of ``poller`` sends.

        ``access``: 100 means that every hundredth answer without an error is logged, 0 means that no answer is logged.
        """
        self._poller = poller
        self.log_every(access)

    def trace_as(self, incarnation: int, options: TraceOptions, channel: Channel, agenda: Agenda[AgendaPart]) -> None:
        """Prepares to trace requests on clients' lanes. Tracing begins when trace settings arrive.

        ``incarnation`` is the number of this process in trace ids. ``channel`` sends ended traces to the daemon. ``agenda`` runs
        functions later in the worker's loop.
        """

        def hand_over(traces: TracesEnded) -> bool:
            if channel.waiting < _MAX_WAITING:
                channel.put(traces)
                return True
            return False

        def later(seconds: float, call: Callable[[], None]) -> None:
            agenda.put(lambda _: call(), time.monotonic_ns() + int(seconds * 1e9))

        files = TraceFiles(options.max_byte_size, options.max_files)
        self._channel = channel
        self.tracer = Tracer(incarnation, files, (), hand_over if options.otlp else None, "lane", later)
        self.let_pass()

    def log_every(self, access: int) -> None:
        """Logs from now on one in ``access`` successful answers and up to 10 errors a second, or nothing if ``access`` is 0."""
        self.passed()
        self._log.log_every(access, self.counts["OK"] + self._passed)
        self.let_pass()

    def trace(self, record: TraceChanged | TraceCleared, fds: list[int]) -> None:
        """Applies the trace settings in ``record``. ``fds``: file descriptors that came with it, which this object closes."""
        self.passed()
        if isinstance(record, TraceChanged):
            self.tracer.changed(record, fds)
        else:
            self.tracer.cleared(record)
        self.let_pass()

    def close(self) -> None:
        """Ends tracing, and sends the daemon all queued records. Call it when the worker process ends.

        Traces in memory are written to files or sent to the daemon.
        """
        self.tracer.close()
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.flush()

    def let_pass(self) -> None:
        """Tells the C extension how many requests on clients' lanes it may answer before Python must log or trace a request."""
        self.watched = self.tracer.on or self._log.every > 0
        unlogged = self._log.next - self.counts["OK"] - self._passed - 1
        self._poller.let_pass(max(0, min(_ENDLESS, unlogged, self.tracer.passes.left)), self.tracer.joins)

    def passed(self) -> None:
        """Tells the tracer how many requests the C extension has answered since the last call of this method."""
        count = self._poller.lane_requests
        self.tracer.passes.left -= count - self._passed
        self._passed = count

    def arrived(self, submitter: SubmitterLink[Request], record: RequestRecord, now_ns: int) -> RequestRecord:
        """Begins a trace of the request in ``record`` if the trace settings select this request.

        If a trace was begun, returns a copy of ``record`` whose ``trace`` says what to trace. Otherwise, returns ``record``.
        """
        tracer, said = self.tracer, submitter.parent
        submitter.parent = None
        parent = ""
        if said is not None and said.request_id == record.request_id:
            parent = f"00-{said.trace_id}-{said.span_id}-01"
        if tracer.passes.left and not parent:
            tracer.passes.left -= 1
            return record
        trace = tracer.sample(_model(submitter, record), parent, now_ns)
        if trace is None:
            return record
        submitter.traces[record.request_id] = trace
        submitter.context = TraceContext(record.request_id, *trace.context)
        record = replace(record, trace=record.trace & TIMING | trace.level)
        trace.sent(record, now_ns)
        return record

    @staticmethod
    def _end_trace(
        submitter: SubmitterLink[Request], request_id: int, error: ServingError | None, request: Request | None = None
    ) -> str:
        trace = submitter.traces.pop(request_id, None)
        if trace is None:
            return ""
        if error is None and submitter.closed:
            error = Cancelled()
        if error is not None:
            trace.failed(error.code, error.message)
        timeline = None if request is None or request.timeline is None else request.timeline.told()
        trace.completed(0 if request is None else request.version.version, timeline)
        trace.end()
        return trace.context[0]

    def ended(self, request: Request, error: ServingError | None) -> None:
        """Counts a request's final answer. ``error``: the error that the answer reports; None: it reports none."""
        submitter = request.submitter
        trace_id = self._end_trace(submitter, request.request_id, error, request) if submitter.traces else ""
        if submitter.segments is None or submitter.closed:
            return
        if error is not None:
            self._failed(submitter, error, request.version.name, request.client_id, trace_id, request)
            return
        self.counts["OK"] = count = self.counts["OK"] + 1
        if count + self._passed >= self._log.next:
            self._log.next = count + self._passed + self._log.every
            version, names = request.version.version, (request.version.name, request.client_id)
            self._log.write("OK", names, request.own, request.arrived_ns, _client(submitter), trace_id, version)

    def rejected(self, submitter: SubmitterLink[Request], record: RequestRecord, error: ServingError) -> None:
        """Counts an error with which a submitter's invalid record was answered."""
        if submitter.segments is None:
            return
        trace_id = self._end_trace(submitter, record.request_id, error) if submitter.traces else ""
        self._failed(submitter, error, _model(submitter, record), record.client_id, trace_id)

    def _failed(
        self,
        submitter: SubmitterLink[Request],
        error: ServingError,
        model: str,
        client_id: str,
        trace_id: str,
        request: Request | None = None,
    ) -> None:
        self.counts[error.code] += 1
        # What a client has cancelled itself went wrong nowhere.
        if error.code == Cancelled.code:
            return
        client, texts = _client(submitter), {"error": error.message, "model": model, "id": client_id}
        told = {"protocol": "lane", "time": time.time(), "code": error.code}
        told |= {name: text[:MAX_TEXT] for name, text in texts.items()}
        self._recent.append(told | {"client": client, "trace_id": trace_id})
        if self._log.admits_error():
            own, arrived_ns = (None, 0) if request is None else (request.own, request.arrived_ns)
            names = model, client_id
            self._log.write(error.code, names, own, arrived_ns, client, trace_id, error=error.message)

    def recent(self) -> list[dict[str, Any]]:
        """Describes the most recent errors for operators, oldest first: time, code, message, model, request id and client."""
        return [*self._recent]

    def __repr__(self) -> str:
        return f"<LaneAnswers {self.counts.total()}, {len(self._recent)} errors>"


def _client(submitter: SubmitterLink[Request]) -> str:
    return "" if submitter.owner is None else submitter.owner.name


def _model(submitter: SubmitterLink[Request], record: RequestRecord) -> str:
    """Returns the name of the model that ``record`` asks, or "" if it gives the number of an unknown prepared request."""
    prepared = record.prepared
    try:
        return (submitter.preparations[prepared].prepared if isinstance(prepared, int) else prepared).model
    except InvalidArgument:
        return ""
