"""Heads of inference requests that were parsed before, whichever connection brought them. Sans-I/O.

    head       | request line | Host: a | User-Agent: b | Content-Length: 9 | traceparent: 00-c | |   the same bytes,
    without    | request line | Host: a |               | Content-Length: 9 |                   | |   or those that matter

The parser alone says what a head means; here its word is kept. A header line that is well formed and that neither the parser nor
this front looks at changes nothing, so a head is known as well by what is left without such lines: many clients and proxies put a
number of their own into each request.
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
    """Makes the pattern of a line with a field that is none of these: its name is a token, its value is printed."""
    return re.compile(
        rb"\r\n(?!(?:" + names + rb"):)[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e]*(?=\r\n)", re.IGNORECASE
    )


_OTHER_LINE = _line_without(_SIGNIFICANT)
_OTHER_LINE_BUT_PARENT = _line_without(_SIGNIFICANT + rb"|traceparent")


class Heads(BoundedCache[bytes, InferHead]):
    """Caches parsed heads by their bytes, up to the empty line; one per front. ``heads[bytes]`` None: they must be parsed."""

    __slots__ = ("_cuts", "_max_byte_size", "_max_fields", "_other_line")

    def __init__(
        self, max_byte_size: int, max_fields: int, cuts: bool, count: int = MAX_COUNT, joins: bool = False
    ) -> None:
        """
        Args:
          count: so many are remembered at least, but no more than ``MAX_COUNT``.
          max_byte_size, max_fields: of heads that are taken at all.
          cuts: whether lines may be left out: no operator's rule looks at them.
          joins: whether each ``traceparent`` is read.
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
        """Caches the meaning of bytes that the parser took for one head."""
        if len(head) > MAX_HEAD or not head.startswith(b"POST ") or head.find(END) != len(head) - len(END):
            return
        if meaning.content_length is None or meaning.error is not None or meaning.trace_parent:
            return
        self.put(head, meaning)
        if self._cuts:
            cut = self._other_line.sub(b"", head)
            if len(cut) < len(head):
                self.put(cut, meaning)
