"""Counts a front's answers by status code, and writes its access log: every n-th good answer, and errors, ten a second at most.

    good answer ─▶ counted ─▶ every ``log.access``-th: a line
    error       ─▶ counted ─▶ with ``log.access``: a line, ten a second at most
                          ├─▶ the client's mistake: one line a minute for all
                          ╰─▶ among the recent ones, for the page and for tensorctl

A line is a JSON object: the message in the text formats of the log, its ``request`` in the format ``json``. Used in the front's
loop only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from tensord.daemon.control.refusals import Refusals
from tensord.daemon.control.shared_counters import CODES, FrontCounters
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.in_flight import InFlight
from tensord.shm.messages import Buffer, Content

_log = logging.getLogger("tensord.access")
#: Counts never get there.
_NEVER = 1 << 64
#: Refusals that one front logs in a second at most.
_MAX_REFUSALS = 10
_SECOND_NS = 10**9
#: Characters of an error's text, and of names that a client has chosen, in a line.
_MAX_TEXT = 300
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
    """Counts the answers that one front has sent, by code, writes its access log, and remembers its last errors."""

    def __init__(self, counters: FrontCounters, refusals: Refusals, protocol: str, access: int = 0) -> None:
        """Begins to count answers.

        Args:
          counters: the counters of this front in shared memory, where answers are counted.
          refusals: gets the errors that are the clients' mistakes, to log them.
          protocol: "http" or "grpc".
          access: the access log has errors, and every ``access``-th good answer; 0: there is no log.
        """
        self._words, self._good = counters.codes
        self._protocol = protocol
        self._places = {code: self._good + number for number, code in enumerate(CODES[protocol])}
        self._other = self._good + len(CODES[protocol]) - 1
        self._refusals = refusals
        self._every = 0
        #: The count of good answers at which the next one is logged.
        self._next = _NEVER
        #: Since when refusals are counted for their rate, how many were logged, and how many were not.
        self._window_ns = self._logged = self._left_out = 0
        #: The last errors: when, in seconds since 1970, code, sentence, model, client's id, client and trace.
        self._recent: deque[tuple[float, str, str, str, str, str, str]] = deque(maxlen=_MAX_RECENT)
        self.log_every(access)

    def log_every(self, access: int) -> None:
        """Logs every ``access``-th good answer from now on, and errors, at most 10 a second; 0: logs neither."""
        if access != self._every:
            self._every = access
            self._next = self._words[self._good] + access if access else _NEVER

    def good(self, request: InFlight, version: int, answer: Buffer | Sequence[Buffer]) -> None:
        """Counts a good answer to an inference request, and writes every n-th one to the access log, if it is on.

        ``version``: the model version that answered; ``answer``: the bytes to send.
        """
        words, at = self._words, self._good
        words[at] = count = words[at] + 1
        if count >= self._next:
            self._next = count + self._every
            size = len(answer) if isinstance(answer, bytes | memoryview) else sum(map(len, answer))
            self._write(CODES[self._protocol][0], request, version, size)

    def managed(self, code: str) -> None:
        """Counts an answer to a request other than inference; a good one is not logged.

        ``code``: the HTTP status in digits, or the name of the gRPC status.
        """
        self._words[self._places.get(code, self._other)] += 1

    def failed(self, code: str, message: str, request: InFlight | None = None, account: Account | None = None) -> None:
        """Counts an answer that is an error, and logs it if the access log is on.

        Args:
          code: the HTTP status in digits, or the name of the gRPC status.
          request: the inference request; None: it was another request, or none that was understood.
          account: the account of the client, where ``request`` does not have it.
        """
        self._words[self._places.get(code, self._other)] += 1
        model, client_id = ("", "") if request is None else request.names
        model, message = model[:_MAX_TEXT], message[:_MAX_TEXT]
        by = (None if request is None else request.account) or account
        trace_id = "" if request is None or request.context is None else request.context[0]
        self._recent.append(
            (time.time(), code, message, model, client_id[:_MAX_TEXT], "" if by is None else by.client.owner, trace_id)
        )
        if code in _CLIENTS:
            self._refusals.mistaken(model, code, message)
        if self._every:
            now_ns = time.monotonic_ns()
            if now_ns - self._window_ns >= _SECOND_NS:
                self._window_ns, self._logged = now_ns, 0
            if self._logged < _MAX_REFUSALS:
                self._logged += 1
                self._write(code, request, error=message, account=account)
            else:
                self._left_out += 1

    def recent(self) -> list[dict[str, object]]:
        """Returns the last errors that this front has sent, the latest last, as JSON values for operators.

        The keys: protocol, time (seconds since 1970), code, error, model, id, client, trace_id.
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
        line: dict[str, object] = {"protocol": self._protocol, "code": code}
        if request is not None and request.context is not None:
            line["trace_id"] = request.context[0]
        if request is not None:
            model, client_id = request.names
            account = account or request.account
            line |= {"model": model[:_MAX_TEXT], "version": version, "id": client_id[:_MAX_TEXT]}
            if request.record.request_id:
                line["input_bytes"] = _size(request.record.contents)
                line["duration_us"] = (time.monotonic_ns() - request.record.received_ns) // 1000
        if account is not None:
            line["client"] = account.client.owner
        if size:
            line["answer_bytes"] = size
        if error:
            line["error"] = error
        if self._left_out:
            line["left_out"] = self._left_out
            self._left_out = 0
        _log.info("%s", msgspec.json.encode(line).decode(), extra={"request": line})

    def __repr__(self) -> str:
        return f"<Answered {self._words[self._good]} well over {self._protocol}>"


def _size(contents: Iterable[Content]) -> int:
    """Returns the total size in bytes of a request's input tensors, except those in clients' shared-memory regions."""
    return sum(len(content) if isinstance(content, bytes) else content.byte_size for content in contents)
