"""Counts final answers on clients' lanes (their own sockets to a worker) by code, logs some, and keeps the last errors.

Fronts do so for answers over HTTP and gRPC (``tensord.daemon.front.answered``). What the C part answers is counted by it: it is
told how many may pass until Python has to look at a request, because its answer may be one for the access log.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

from tensord.shm.access_log import MAX_TEXT, AccessLog
from tensord.shm.errors import Cancelled, InvalidArgument, ServingError
from tensord.shm.messages import RequestRecord
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink

#: The last errors that are kept.
_MAX_RECENT = 100
#: More requests than ever pass.
_ENDLESS = 1 << 62
#: When, in seconds since 1970, code, sentence, model, the request's id, and the user whose client has the lane.
_Error = tuple[float, str, str, str, str, str]


class LaneAnswers:
    """Counts the final answers to clients that have a lane (a channel of their own to the worker); ignores those to fronts.

    Only the thread of the worker's loop uses it.
    """

    def __init__(self) -> None:
        #: Answers by error code, "OK" for success; answers of the C part are not counted here.
        self.counts: Counter[str] = Counter()
        #: Answers of the C part, all of them good, as of the last ``passed``.
        self._passed = 0
        self._recent: deque[_Error] = deque(maxlen=_MAX_RECENT)
        self._log = AccessLog("lane")
        #: Whether the C part has to be told how many requests may pass, and to say how many did.
        self.watched = False

    def log_every(self, access: int) -> None:
        """Logs every ``access``-th good answer from now on, and errors, ten a second at most; 0: logs neither."""
        self._log.log_every(access, self.counts["OK"] + self._passed)
        self.watched = access > 0

    @property
    def may_pass(self) -> int:
        """Returns how many requests the C part may answer before Python has to look at each."""
        return min(_ENDLESS, max(0, self._log.next - self.counts["OK"] - self._passed - 1))

    def passed(self, count: int) -> None:
        """Notes how many requests the C part has answered so far."""
        self._passed = count

    def ended(self, request: Request, error: ServingError | None) -> None:
        """Counts a request's final answer. ``error``: what it reports; None: it reports no error."""
        submitter = request.submitter
        if submitter.segments is None or submitter.closed:
            return
        if error is not None:
            self._failed(submitter, error, request.version.name, request.client_id, request)
            return
        self.counts["OK"] = count = self.counts["OK"] + 1
        if count + self._passed >= self._log.next:
            self._log.next = count + self._passed + self._log.every
            version, names = request.version.version, (request.version.name, request.client_id)
            self._log.write("OK", names, request.own, request.arrived_ns, _client(submitter), version=version)

    def rejected(self, submitter: SubmitterLink[Request], record: RequestRecord, error: ServingError) -> None:
        """Counts an error that answers a received record (message) which is no valid request."""
        if submitter.segments is None:
            return
        prepared = record.prepared
        try:
            model = (submitter.preparations[prepared].prepared if isinstance(prepared, int) else prepared).model
        except InvalidArgument:
            model = ""
        self._failed(submitter, error, model, record.client_id)

    def _failed(
        self,
        submitter: SubmitterLink[Request],
        error: ServingError,
        model: str,
        client_id: str,
        request: Request | None = None,
    ) -> None:
        self.counts[error.code] += 1
        # What a client has cancelled itself went wrong nowhere.
        if error.code == Cancelled.code:
            return
        texts = (text[:MAX_TEXT] for text in (error.message, model, client_id))
        self._recent.append((time.time(), error.code, *texts, _client(submitter)))  # type: ignore[arg-type]
        if self._log.admits_error():
            own, arrived_ns = (None, 0) if request is None else (request.own, request.arrived_ns)
            names = model, client_id
            self._log.write(error.code, names, own, arrived_ns, _client(submitter), error=error.message)

    def recent(self) -> list[dict[str, Any]]:
        """Describes the last errors for operators, the latest last: time, code, message, model, request id and client of each."""
        names = ("time", "code", "error", "model", "id", "client")
        return [{"protocol": "lane", **dict(zip(names, row, strict=True)), "trace_id": ""} for row in self._recent]

    def __repr__(self) -> str:
        return f"<LaneAnswers {self.counts.total()}, {len(self._recent)} errors>"


def _client(submitter: SubmitterLink[Request]) -> str:
    """Returns the name of the user whose client has the lane."""
    return "" if submitter.owner is None else submitter.owner.name
