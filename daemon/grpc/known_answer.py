"""A good answer whose bytes are known but for the request's id and the tensors: written at once, frames and all. Sans-I/O.

    stream    DATA: | prefix | ModelStreamInferResponse |
    unary     HEADERS | DATA: | prefix | ModelInferResponse | HEADERS: the trailers

Answers of one form whose ids and tensors are as long as each other's differ in nothing else, and in the number of their stream.
"""

from __future__ import annotations

from daemon.grpc import frames, header_blocks, response_codec
from daemon.grpc.reply import PREFIX
from shm.forms import no_view
from shm.messages import Completion, Content, FormCompletion, Inline

#: Where the number of a stream begins in a frame's head.
_NUMBER_AT = 5


class KnownAnswer:
    """How to write answers like one to a request with such an id."""

    __slots__ = ("_pattern", "_sizes", "_template", "framed")

    def __init__(
        self, template: Completion, answer: FormCompletion, model: str, client_id: bytes, streamed: bool
    ) -> None:
        self._template = template
        self._sizes = [*map(len, answer.contents)]  # type: ignore[arg-type]
        message, size = _message(template, self._sizes, model, client_id, True if streamed else None)
        if streamed:
            begin = b"\x12" + response_codec.varint(size)
            message, size = _literal(begin) + message, len(begin) + size
        #: What it takes of the client's windows.
        self.framed = PREFIX.size + size
        #: With a place for each number of a stream, for the id and for the tensors.
        self._pattern = _head(frames.DATA, 0, self.framed) + _literal(PREFIX.pack(0, size)) + message
        if not streamed:
            self._pattern = b"".join(
                (
                    _head(frames.HEADERS, frames.END_HEADERS, len(header_blocks.RESPONSE)),
                    _literal(header_blocks.RESPONSE),
                    self._pattern,
                    _head(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, len(header_blocks.TRAILERS_OK)),
                    _literal(header_blocks.TRAILERS_OK),
                )
            )

    def fits(self, template: Completion, contents: tuple[Content, ...]) -> bool:
        """Whether an answer of that form with those tensors is one of these."""
        return template is self._template and [*map(len, contents)] == self._sizes  # type: ignore[arg-type]

    def streamed(self, number: bytes, client_id: bytes, contents: tuple[Content, ...]) -> bytes:
        """An answer of a stream of that number."""
        return self._pattern % (number, client_id, *contents)

    def unary(self, number: bytes, client_id: bytes, contents: tuple[Content, ...]) -> bytes:
        """The whole answer of a unary call."""
        return self._pattern % (number, number, client_id, *contents, number)


def _message(
    template: Completion, sizes: list[int], model: str, client_id: bytes, final: bool | None
) -> tuple[bytes, int]:
    """A ModelInferResponse with a place for the id and for each tensor of these sizes, and how long it is with them."""
    outputs = len(template.outputs)
    pieces = response_codec.encode(template, model, "", no_view, final)
    begin = bytes(pieces[0])
    if client_id:
        begin += response_codec.field_start(0x1A, len(client_id))
    rest = b"".join(pieces[1 : len(pieces) - 2 * outputs])
    pattern, size = [_literal(begin), b"%b", _literal(rest)], len(begin) + len(client_id) + len(rest)
    inside = iter(sizes)
    for tensor in template.outputs:
        is_inside = type(tensor.place) is Inline
        length = next(inside) if is_inside else 0
        start = response_codec.raw(length)
        pattern += (_literal(start), b"%b" if is_inside else b"")
        size += len(start) + length
    return b"".join(pattern), size


def _head(kind: int, flags: int, size: int) -> bytes:
    """A frame's head with a place for the stream's number."""
    return _literal(frames.head(kind, flags, 0, size)[:_NUMBER_AT]) + b"%b"


def _literal(content: bytes) -> bytes:
    return content.replace(b"%", b"%%")
