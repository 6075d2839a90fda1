"""Caches the parsed heads of inference requests, for all connections of a front. Sans-I/O.

A head is the request line and the headers of an HTTP request. Headers that the daemon does not read are ignored in the
comparison of heads, unless the operator has rules for headers. So a head is found in the cache even if a client puts another
identifier into each request.
"""

from __future__ import annotations

import re

from tensord.daemon.front.bounded_cache import BoundedCache
from tensord.daemon.http.message_head import InferHead

#: Longer heads are parsed each time.
MAX_HEAD = 2048
MAX_COUNT = 512
END = b"\r\n\r\n"
#: Fields that the parser, the connection or the request has an eye on.
_SIGNIFICANT = (
    rb"host|connection|proxy-connection|keep-alive|upgrade|expect|te|trailer|transfer-encoding|content-length"
    rb"|inference-header-content-length|content-encoding|accept-encoding|tensord-timing"
    rb"|endpoint-load-metrics-format"
)


def _line_without(names: bytes) -> re.Pattern[bytes]:
    return re.compile(
        rb"\r\n(?!(?:" + names + rb"):)[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e]*(?=\r\n)", re.IGNORECASE
    )


_OTHER_LINE = _line_without(_SIGNIFICANT)
_OTHER_LINE_BUT_PARENT = _line_without(_SIGNIFICANT + rb"|traceparent")


class Heads(BoundedCache[bytes, InferHead]):
    """Caches the parsed heads of inference requests for one front. The key is the bytes of a head with its final empty line.

    ``heads[key]`` returns the parsed head, or None if the head is not cached.
    """

    __slots__ = ("_cuts", "_max_byte_size", "_max_fields", "_other_line")

    def __init__(
        self, max_byte_size: int, max_fields: int, cuts: bool, count: int = MAX_COUNT, joins: bool = False
    ) -> None:
        """Creates an empty cache. A head is the request line and the headers of an HTTP request.

        Args:
          max_byte_size: the most bytes that the daemon accepts in a head.
          max_fields: the most headers that the daemon accepts in a head.
          cuts: whether heads count as equal if they differ only in headers that the daemon does not read. Must be False if the
          operator has rules for headers.
          count: how many heads to cache, ``MAX_COUNT`` at most.
          joins: whether the header ``traceparent`` is one of the headers that the daemon reads.
        """
        # Each by its bytes, and by what of them matters.
        super().__init__(2 * min(count, MAX_COUNT))
        self._max_byte_size = min(MAX_HEAD, max_byte_size)
        self._max_fields = max_fields
        self._cuts = cuts
        self._other_line = _OTHER_LINE_BUT_PARENT if joins else _OTHER_LINE

    def __missing__(self, head: bytes) -> InferHead | None:
        meaning = super().__missing__(head)
        if meaning is None and self._cuts and len(head) <= self._max_byte_size:
            cut = self._other_line.sub(b"", head)
            if len(cut) == len(head):
                return None
            meaning = self[cut]
            if meaning is not None:
                if head.count(b"\r\n") - 2 > self._max_fields:
                    return None
                self.put(head, meaning)
        return meaning

    def learn(self, head: bytes, meaning: InferHead) -> None:
        """Caches ``meaning``, which is the parsed form of ``head``.

        Does nothing if ``head`` has more than ``MAX_HEAD`` bytes, or is not exactly one complete head of a POST request.
        Does nothing if ``meaning`` has an ``error``, a ``trace_parent`` or no ``content_length``.
        """
        if len(head) > MAX_HEAD or not head.startswith(b"POST ") or head.find(END) != len(head) - len(END):
            return
        if meaning.content_length is None or meaning.error is not None or meaning.trace_parent:
            return
        self.put(head, meaning)
        if self._cuts:
            cut = self._other_line.sub(b"", head)
            if len(cut) < len(head):
                self.put(cut, meaning)
