"""A good answer whose bytes are known but for the request's id and the tensors: written at once, frames and all. Sans-I/O.

    stream    DATA: | prefix | ModelStreamInferResponse |
    unary     HEADERS | DATA: | prefix | ModelInferResponse | HEADERS: the trailers

Answers of one form whose ids and tensors are as long as each other's differ in nothing else, and in the number of their stream.
A tensor in a lease is left where it lies: what comes before it and what comes behind it are written around it.
"""

from __future__ import annotations

from collections.abc import Callable

from daemon.grpc import frames, header_blocks, response_codec
from daemon.grpc.call import Buffer
from daemon.grpc.reply import PREFIX
from shm.forms import no_view
from shm.messages import Completion, Content, FormCompletion, Inline, Slice

#: Bytes of an answer in the worker's response arena.
View = Callable[[Slice], memoryview]
#: Where the number of a stream begins in a frame's head.
_NUMBER_AT = 5


class KnownAnswer:
    """How to write answers like one to a request with such an id."""

    __slots__ = ("_cuts", "_is_mixed", "_pattern", "_sizes", "_template", "framed")

    def __init__(
        self, template: Completion, answer: FormCompletion, model: str, client_id: bytes, streamed: bool
    ) -> None:
        self._template = template
        self._sizes = _sizes(answer.contents)
        message, size, cuts = _message(template, self._sizes, model, client_id, True if streamed else None)
        before = frames.HEAD_SIZE + PREFIX.size
        if streamed:
            begin = b"\x12" + response_codec.varint(size)
            message, size = _literal(begin) + message, len(begin) + size
            before += len(begin)
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
            before += frames.HEAD_SIZE + len(header_blocks.RESPONSE)
        #: Where tensors that lie in a lease belong into what is written.
        self._cuts = [before + cut for cut in cuts]
        self._is_mixed = len(cuts) < len(answer.contents)

    def fits(self, template: Completion, contents: tuple[Content, ...]) -> bool:
        """Whether an answer of that form with those tensors is one of these."""
        return template is self._template and [*map(len, contents)] == self._sizes  # type: ignore[arg-type]

    def fits_lent(self, template: Completion, contents: tuple[Content, ...]) -> bool:
        """The same of an answer in a lease."""
        return template is self._template and _sizes(contents) == self._sizes

    def inside(self, contents: tuple[Content, ...]) -> tuple[Content, ...]:
        """The tensors that are not in the lease."""
        return tuple([content for content in contents if type(content) is bytes]) if self._is_mixed else ()

    def around(self, written: bytes, contents: tuple[Content, ...], view: View) -> list[Buffer]:
        """What was written of an answer with the tensors in its lease where they belong."""
        pieces: list[Buffer] = []
        at = number = 0
        for content in contents:
            if type(content) is Slice:
                cut = self._cuts[number]
                pieces += (written[at:cut], view(content))
                at = cut
                number += 1
        pieces.append(written[at:])
        return pieces

    def streamed(self, number: bytes, client_id: bytes, contents: tuple[Content, ...]) -> bytes:
        """An answer of a stream of that number."""
        return self._pattern % (number, client_id, *contents)

    def unary(self, number: bytes, client_id: bytes, contents: tuple[Content, ...]) -> bytes:
        """The whole answer of a unary call."""
        return self._pattern % (number, number, client_id, *contents, number)


def _sizes(contents: tuple[Content, ...]) -> list[int]:
    """Of each tensor; what is below 0 is the complement of one in a lease."""
    return [~content.byte_size if type(content) is Slice else len(content) for content in contents]  # type: ignore[arg-type]


def _message(
    template: Completion, sizes: list[int], model: str, client_id: bytes, final: bool | None
) -> tuple[bytes, int, list[int]]:
    """A ModelInferResponse with a place for the id and for each tensor of these sizes, and how long it is with them.

    Tensors in a lease are left out; last, where in what is written they belong.
    """
    outputs = len(template.outputs)
    pieces = response_codec.encode(template, model, "", no_view, final)
    begin = bytes(pieces[0])
    if client_id:
        begin += response_codec.field_start(0x1A, len(client_id))
    rest = b"".join(pieces[1 : len(pieces) - 2 * outputs])
    pattern, size = [_literal(begin), b"%b", _literal(rest)], len(begin) + len(client_id) + len(rest)
    own = iter(sizes)
    cuts, lent = [], 0
    for tensor in template.outputs:
        is_own = type(tensor.place) is Inline
        length = next(own) if is_own else 0
        is_lent = length < 0
        length = ~length if is_lent else length
        start = response_codec.raw(length)
        pattern += (_literal(start), b"%b" if is_own and not is_lent else b"")
        size += len(start) + length
        if is_lent:
            lent += length
            cuts.append(size - lent)
    return b"".join(pattern), size, cuts


def _head(kind: int, flags: int, size: int) -> bytes:
    """A frame's head with a place for the stream's number."""
    return _literal(frames.head(kind, flags, 0, size)[:_NUMBER_AT]) + b"%b"


def _literal(content: bytes) -> bytes:
    return content.replace(b"%", b"%%")
