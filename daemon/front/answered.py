"""Counts a front's answers by status code, remembers its last errors, and writes its access log.

The access log gets every n-th successful inference answer, and at most ten answers a second that are errors. The configuration
key ``log.access`` sets n. If n is 0, nothing is written to the access log. Only the front's event loop uses this module.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from tensord.daemon.control.refusals import Refusals
from tensord.daemon.control.shared_counters import CODES, FrontCounters
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.in_flight import InFlight
from tensord.shm.access_log import MAX_TEXT, AccessLog
from tensord.shm.messages import Buffer

#: The last errors that are kept.
_MAX_RECENT = 100
#: Codes that say that the client was wrong, and that nobody counts or logs elsewhere.
_CLIENTS = frozenset(
    [
        *("400", "403", "404", "405", "408", "409", "413", "431"),
        *("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"),
        *("FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "UNAUTHENTICATED", "UNKNOWN"),
    ]
)


class Answered:
    """Counts the answers of one front by status, writes its access log, and remembers its last errors."""

    def __init__(self, counters: FrontCounters, refusals: Refusals, protocol: str, access: int = 0) -> None:
        """Starts with an empty list of recent errors.

        Args:
          counters: the front's counters in shared memory, in which the answers are counted.
          refusals: counts the errors of clients by model.
          protocol: "http" or "grpc".
          access: what is logged, as for ``log_every``.
        """
        self._words, self._good = counters.codes
        self._protocol = protocol
        self._places = {code: self._good + number for number, code in enumerate(CODES[protocol])}
        self._other = self._good + len(CODES[protocol]) - 1
        self._refusals = refusals
        self._log = AccessLog(protocol)
        #: The last errors: when, in seconds since 1970, code, sentence, model, client's id, client and trace.
        self._recent: deque[tuple[float, str, str, str, str, str, str]] = deque(maxlen=_MAX_RECENT)
        self.log_every(access)

    def log_every(self, access: int) -> None:
        """Sets what is logged: every ``access``-th successful inference answer, and at most 10 errors a second.

        If ``access`` is 0, nothing is logged.
        """
        self._log.log_every(access, self._words[self._good])

    def good(self, request: InFlight, version: int, answer: Buffer | Sequence[Buffer]) -> None:
        """Counts a successful inference answer, and writes it to the access log if ``log_every`` demands it.

        ``version``: the version of the model, or 0 if it is unknown. ``answer``: the answer's content, whose size is logged.
        """
        words, at = self._words, self._good
        words[at] = count = words[at] + 1
        if count >= self._log.next:
            self._log.next = count + self._log.every
            size = len(answer) if isinstance(answer, bytes | memoryview) else sum(map(len, answer))
            self._write(CODES[self._protocol][0], request, version, size)

    def managed(self, code: str) -> None:
        """Counts the answer to a request other than inference.

        ``code``: the HTTP status in digits, or the name of the gRPC status.
        """
        place = self._places.get(code, self._other)
        self._words[place] += 1
        if place == self._good:
            self._log.next += 1  # which counts answers to inference alone

    def failed(self, code: str, message: str, request: InFlight | None = None, account: Account | None = None) -> None:
        """Counts, remembers and logs an answer that is an error. The access log takes at most 10 errors a second.

        Args:
          code: the HTTP status in digits, or the name of the gRPC status.
          message: the text of the error.
          request: the inference request. It is None if the request could not be decoded, or was no inference request.
          account: ``account.client`` is the client who gets the answer. Needed only if ``request`` is None or has no account.
        """
        self._words[self._places.get(code, self._other)] += 1
        model, client_id = ("", "") if request is None else request.names
        model, message = model[:MAX_TEXT], message[:MAX_TEXT]
        by = (None if request is None else request.account) or account
        trace_id = "" if request is None or request.context is None else request.context[0]
        self._recent.append(
            (time.time(), code, message, model, client_id[:MAX_TEXT], "" if by is None else by.client.owner, trace_id)
        )
        if code in _CLIENTS:
            self._refusals.mistaken(model, code, message)
        if self._log.admits_error():
            self._write(code, request, error=message, account=account)

    def recent(self) -> list[dict[str, object]]:
        """Returns the last errors that this front has sent, the latest last, as JSON values.

        The keys are protocol, time (seconds since 1970), code, error, model, id, client and trace_id.
        """
        names = ("time", "code", "error", "model", "id", "client", "trace_id")
        return [{"protocol": self._protocol, **dict(zip(names, row, strict=True))} for row in self._recent]

    def _write(
        self,
        code: str,
        request: InFlight | None,
        version: int = 0,
        size: int = 0,
        error: str = "",
        account: Account | None = None,
    ) -> None:
        account = account or (None if request is None else request.account)
        client = None if account is None else account.client.owner
        if request is None:
            self._log.write(code, None, None, 0, client, error=error)
            return
        sent = request.record if request.record.request_id else None
        trace_id = "" if request.context is None else request.context[0]
        self._log.write(code, request.names, sent, request.record.received_ns, client, trace_id, version, size, error)

    def __repr__(self) -> str:
        return f"<Answered {self._words[self._good]} well over {self._protocol}>"
