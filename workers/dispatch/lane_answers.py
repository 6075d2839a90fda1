"""Counts final answers on clients' lanes (their own sockets to a worker) by code, and keeps the last errors for operators.

Fronts do so for answers over HTTP and gRPC (``tensord.daemon.front.answered``).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

from tensord.shm.errors import Cancelled, InvalidArgument, ServingError
from tensord.shm.messages import RequestRecord
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink

#: The last errors that are kept, and characters of an error's text and of names that a client has chosen.
_MAX_RECENT = 100
_MAX_TEXT = 300
#: When, in seconds since 1970, code, sentence, model, the request's id, and the user whose client has the lane.
_Error = tuple[float, str, str, str, str, str]


class LaneAnswers:
    """Counts the final answers to clients that have a lane (a channel of their own to the worker); ignores those to fronts.

    Only the thread of the worker's loop uses it.
    """

    def __init__(self) -> None:
        #: Answers by error code, "OK" for success; answers of the C part are not counted here.
        self.counts: Counter[str] = Counter()
        self._recent: deque[_Error] = deque(maxlen=_MAX_RECENT)

    def ended(self, request: Request, error: ServingError | None) -> None:
        """Counts a request's final answer. ``error``: what it reports; None: it reports no error."""
        submitter = request.submitter
        if submitter.segments is None or submitter.closed:
            return
        if error is None:
            self.counts["OK"] += 1
        else:
            self._failed(submitter, error, request.version.name, request.client_id)

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

    def _failed(self, submitter: SubmitterLink[Request], error: ServingError, model: str, client_id: str) -> None:
        self.counts[error.code] += 1
        # What a client has cancelled itself went wrong nowhere.
        if error.code != Cancelled.code:
            owner = "" if submitter.owner is None else submitter.owner.name
            texts = (text[:_MAX_TEXT] for text in (error.message, model, client_id))
            self._recent.append((time.time(), error.code, *texts, owner))  # type: ignore[arg-type]

    def recent(self) -> list[dict[str, Any]]:
        """Describes the last errors for operators, the latest last: time, code, message, model, request id and client of each."""
        names = ("time", "code", "error", "model", "id", "client")
        return [{"protocol": "lane", **dict(zip(names, row, strict=True)), "trace_id": ""} for row in self._recent]

    def __repr__(self) -> str:
        return f"<LaneAnswers {self.counts.total()}, {len(self._recent)} errors>"
