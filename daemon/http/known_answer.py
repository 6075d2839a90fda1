"""The answer to a request that repeats itself: while it has the same form, only its tensors change. Sans-I/O.

answer   | head and JSON, as last time | part | part | ...     parts of the same sizes: the head says how long each is
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daemon.http.decoded_request import DecodedRequest
from daemon.http.response_codec import Buffer, encode, response_head
from shm.forms import no_view, whole_answer
from shm.messages import Completion, FormCompletion, Inline, Slice

#: Longer heads are not worth remembering with every connection.
_MAX_HEAD = 2048


class KnownAnswer:
    """To one known request."""

    __slots__ = ("_decoded", "_head", "_model", "_sizes", "_template")

    def __init__(self, model: str, decoded: DecodedRequest) -> None:
        """``model`` as the request names it."""
        self._model = model
        self._decoded = decoded
        #: What the last answer's form is, the bytes before its parts, and how long those are: None where it is not remembered.
        self._template: Completion | None = None
        self._head = b""
        self._sizes: list[int] | None = None

    def whole(self, template: Completion, own: FormCompletion) -> bytes | None:
        """All of an answer without a lease, of a connection that stays; None: it is not of a kind that is remembered."""
        contents: Any = own.contents
        if template is not self._template:
            self._learn(template, own, no_view)
        if [*map(len, contents)] != self._sizes:
            return None
        return b"".join((self._head, *contents))

    def pieces(
        self, template: Completion, own: FormCompletion, view: Callable[[Slice], memoryview]
    ) -> list[Buffer] | None:
        """The same of one with a lease; its tensors there go as they lie.

        view: the bytes of a slice of the response arena. Raises InvalidArgument: it is outside.
        """
        if template is not self._template:
            self._learn(template, own, view)
        if self._sizes is None:
            return None
        parts = [view(content) if type(content) is Slice else content for content in own.contents]
        if [*map(len, parts)] != self._sizes:  # type: ignore[arg-type]
            return None
        return [self._head, *parts]  # type: ignore[list-item]

    def _learn(self, template: Completion, own: FormCompletion, view: Callable[[Slice], memoryview]) -> None:
        decoded, self._template, self._sizes = self._decoded, template, None
        for tensor in template.outputs:
            if type(tensor.place) is Inline and not decoded.binary.get(tensor.name, decoded.all_binary):
                return  # its values are in the JSON
        whole = whole_answer(template, own)
        text, parts = encode(whole, self._model, decoded.id, decoded.binary, decoded.all_binary, view)
        head = response_head(len(text), parts) + text
        if len(head) <= _MAX_HEAD:
            self._head, self._sizes = head, [*map(len, parts)]
