"""The bytes before the tensors of answers of one kind: only the id in them changes. Sans-I/O.

answer   | head: lengths | {"id":"...", | the rest of the JSON | part | part | ...     parts of the same sizes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tensord.daemon.http import response_codec
from tensord.daemon.http.decoded_request import DecodedRequest
from tensord.daemon.http.response_codec import Buffer
from tensord.shm.messages import AnswerRecord, PreparedAnswer, Slice

#: Longer texts are not worth remembering.
_MAX_TEXT = 2048
_encode = msgspec.json.Encoder().encode


class AnswerText:
    """The text of answers of one kind to requests of one kind."""

    __slots__ = ("_head", "_id", "_rest", "_sizes", "_tail_size", "prepared")

    def __init__(
        self,
        model: str,
        asked: DecodedRequest,
        prepared: PreparedAnswer,
        own: AnswerRecord,
        view: Callable[[Slice], memoryview],
    ) -> None:
        """From the first of them. Raises InvalidArgument: its tensors are outside of the arena."""
        self.prepared = prepared
        #: How long the parts are; None: such answers are written one by one.
        self._sizes: list[int] | None = None
        self._tail_size = 0
        self._id = ""
        self._head = self._rest = b""
        for tensor in prepared.outputs:
            if tensor.region is None and not asked.binary.get(tensor.name, asked.all_binary):
                return  # its values are in the JSON
        text, parts = response_codec.encode(prepared, own.contents, model, "", asked.binary, asked.all_binary, view)
        if len(text) <= _MAX_TEXT:
            self._rest = text[1:]
            self._sizes = [*map(len, parts)]
            self._tail_size = sum(self._sizes)
            self._say("")

    def _say(self, client_id: str) -> None:
        text = b'{"id":%b,%b' % (_encode(client_id), self._rest) if client_id else b"{" + self._rest
        self._head = response_codec.response_head(len(text), self._tail_size) + text
        self._id = client_id

    def whole(self, client_id: str, own: AnswerRecord) -> bytes | None:
        """All of an answer without a lease, of a connection that stays; None: it is to be written by itself."""
        contents: Any = own.contents
        if [*map(len, contents)] != self._sizes:
            return None
        if client_id != self._id:
            self._say(client_id)
        return b"".join((self._head, *contents))

    def pieces(self, client_id: str, own: AnswerRecord, view: Callable[[Slice], memoryview]) -> list[Buffer] | None:
        """All of an answer with a lease; its tensors there go as they lie. None: it is to be written by itself.

        view: the bytes of a slice of the response arena. Raises InvalidArgument: it is outside.
        """
        if self._sizes is None:
            return None
        parts: list[Any] = [view(content) if type(content) is Slice else content for content in own.contents]
        if [*map(len, parts)] != self._sizes:
            return None
        if client_id != self._id:
            self._say(client_id)
        return [self._head, *parts]
