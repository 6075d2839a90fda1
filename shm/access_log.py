"""Writes a process's access log, which has a line for every n-th successful answer and for errors, at most ten errors a second.

Fronts log answers to HTTP and gRPC requests. Workers log answers to clients that have a lane. A JSON object describes each
answer. In the JSON log format, it is the field ``request`` of the log line. In the text formats, it is the line's message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import msgspec

from tensord.shm.messages import Content, RequestRecord
from tensord.shm.seldom import LineRate

_log = logging.getLogger("tensord.access")
#: Counts never get there.
_NEVER = 1 << 64
#: Errors that one process logs in a second at most.
_MAX_ERRORS = 10
#: Characters of an error's text, and of names that a client has chosen, in a line.
MAX_TEXT = 300


class AccessLog:
    """Writes the access log of one process. ``protocol`` is "http", "grpc" or "lane"."""

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        #: Every so many good answers one is logged; 0: there is no log.
        self.every = 0
        #: The count of good answers at which the next one is logged.
        self.next = _NEVER
        self._errors = LineRate(_MAX_ERRORS)

    def log_every(self, every: int, count: int) -> None:
        """Makes the process log errors and each n-th successful answer, where n is ``every``. If n is 0, nothing is logged.

        ``count`` is the number of successful answers so far. If n has changed, answer ``count`` + n is logged next.
        """
        if every != self.every:
            self.every = every
            self.next = count + every if every else _NEVER

    def admits_error(self) -> bool:
        """Counts an error. Returns whether the rate limit allows a log line for the error."""
        return self.every > 0 and self._errors.admits()

    def write(
        self,
        code: str,
        names: tuple[str, str] | None,
        record: RequestRecord | None,
        received_ns: int,
        client: str | None,
        trace_id: str = "",
        version: int = 0,
        size: int = 0,
        error: str = "",
    ) -> None:
        """Writes a log line about one answer.

        Args:
          code: the answer's code in the protocol, such as "200" or "NOT_FOUND".
          names: the model and the request's id, or None if the request was malformed or not for inference.
          record: the request as it was sent to a worker, or None if it was not sent.
          received_ns: when the request was complete, in ns of CLOCK_MONOTONIC.
          client: the client's name, or None if it is not known.
          trace_id: the id of the request's trace, or "" if it is not traced.
          version: the model version that answered, or 0 if none did.
          size: the number of bytes of the answer, or 0 if it is not known.
          error: the error's text, or "" if the answer is not an error.
        """
        line: dict[str, object] = {"protocol": self._protocol, "code": code}
        if trace_id:
            line["trace_id"] = trace_id
        if names is not None:
            line |= {"model": names[0][:MAX_TEXT], "version": version, "id": names[1][:MAX_TEXT]}
        if record is not None:
            line["input_bytes"] = _size(record.contents)
            line["duration_us"] = (time.monotonic_ns() - received_ns) // 1000
        if client is not None:
            line["client"] = client
        if size:
            line["answer_bytes"] = size
        if error:
            line["error"] = error[:MAX_TEXT]
        if left_out := self._errors.take_left_out():
            line["left_out"] = left_out
        _log.info("%s", msgspec.json.encode(line).decode(), extra={"request": line})

    def __repr__(self) -> str:
        return f"<AccessLog of one in {self.every} over {self._protocol}>"


def _size(contents: Iterable[Content]) -> int:
    return sum(len(content) if isinstance(content, bytes) else content.byte_size for content in contents)
