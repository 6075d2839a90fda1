"""Small responses with the same outputs: what the first of them is known by, the others need not be looked at for again.

a response ─▶ ResponseKind (once for a submitter) ─▶ another one of that kind ─▶ ResponsesAlike: record, record, ...
"""

from __future__ import annotations

from collections.abc import Mapping

from shm.arrays import DTYPES, Array
from shm.forms import Form
from shm.messages import Completion, FormCompletion, response_byte_size
from workers.requests.answer_rows import AnswerPieces

#: Name, datatype and shape of each output.
Described = tuple[tuple[str, str, tuple[int, ...]], ...]


class ResponseKind:
    """Of one model version to one submitter: outputs of these datatypes and shapes, all of them in the record."""

    __slots__ = ("_pieces", "described", "form")

    def __init__(self, form: Form[Completion], described: Described) -> None:
        self.form = form
        self.described = described
        self._pieces: AnswerPieces | None = None

    @property
    def fixed(self) -> bool:
        """Whether all of them have as many bytes: strings differ."""
        return not any(datatype == "BYTES" for _, datatype, _ in self.described)

    def alike(self, request_id: int, result: Mapping[str, Array]) -> ResponsesAlike:
        """For the responses to that request. Only of a kind that is ``fixed``.

        Args:
          result: one of this kind, with whatever other outputs it has.
        """
        sizes = [result[name].nbytes for name, _, _ in self.described]
        if self._pieces is None:
            self._pieces = AnswerPieces(self.form.number, sizes)
        record = FormCompletion(request_id, self.form.number, tuple([bytes(size) for size in sizes]))
        return ResponsesAlike(self, request_id, self._pieces, len(result), response_byte_size(record))

    def __repr__(self) -> str:
        return f"<ResponseKind {self.form.number} {self.described}>"


class ResponsesAlike:
    """Encodes the responses to one request that are of one kind."""

    __slots__ = ("_count", "_head", "_parts", "byte_size", "kind")

    def __init__(self, kind: ResponseKind, request_id: int, pieces: AnswerPieces, count: int, byte_size: int) -> None:
        """
        Args:
          count: outputs that each has, those that nobody asked for among them.
          byte_size: what each counts where those are bounded that a client has not taken.
        """
        self.kind = kind
        self.byte_size = byte_size
        self._count = count
        self._head, behind = pieces.of(request_id)
        self._parts = [
            (name, DTYPES[datatype], shape, follows)
            for (name, datatype, shape), follows in zip(kind.described, behind, strict=True)
        ]

    def record(self, result: Mapping[str, Array]) -> bytes | None:
        """Encoded; None: it is of another kind."""
        if len(result) != self._count:
            return None
        pieces = [self._head]
        for name, dtype, shape, follows in self._parts:
            array = result.get(name)
            if array is None or array.shape != shape or array.dtype != dtype:
                return None
            pieces += (array.tobytes(), follows)
        return b"".join(pieces)

    def __repr__(self) -> str:
        return f"<ResponsesAlike {self.kind!r}>"
