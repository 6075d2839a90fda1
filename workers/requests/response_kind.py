"""Encodes small responses with the same outputs, of which only the first has to be examined.

a response ─▶ ResponseKind (once for a submitter) ─▶ another one of that kind ─▶ ResponsesAlike: record, record, ...
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from tensord.shm.arrays import DTYPES, Array, byte_content, datatype_of
from tensord.shm.messages import PreparedAnswer, response_byte_size
from tensord.shm.prepared import Numbered
from tensord.workers.requests.answer_plan import answer_pieces

#: Name, datatype and shape of each output.
Described = tuple[tuple[str, str, tuple[int, ...]], ...]


def describe(
    result: Mapping[str, Array], wanted: Collection[str], most: int, strings: bool
) -> tuple[Described, tuple[bytes, ...]] | None:
    """Returns names, datatypes and shapes of a response's outputs, and their bytes, or None where these do not go into a record.

    Args:
      wanted: names of the outputs that are asked for; empty: all are.
      most: bytes that go into a record.
      strings: whether outputs may be BYTES, which have another size in each response.
    """
    described: list[tuple[str, str, tuple[int, ...]]] = []
    contents: list[bytes] = []
    left = most
    for name, array in result.items():
        if wanted and name not in wanted:
            continue
        datatype = datatype_of(array.dtype)
        if datatype is None or array.nbytes > left or (datatype == "BYTES" and not strings):
            return None
        contents.append(byte_content(array) if datatype == "BYTES" else array.tobytes())
        left -= len(contents[-1])
        if left < 0:
            return None
        described.append((name, datatype, array.shape))
    return tuple(described), tuple(contents)


class ResponseKind:
    """Responses of one model version to one submitter, with outputs of certain datatypes and shapes in the record."""

    __slots__ = ("_pieces", "described", "numbered")

    def __init__(self, numbered: Numbered[PreparedAnswer], described: Described) -> None:
        self.numbered = numbered
        self.described = described
        #: Of its answers (``answer_pieces``), and what each counts while its client has not taken it.
        self._pieces: tuple[bytes, int, list[bytes], int] | None = None

    def alike(self, request_id: int, count: int) -> ResponsesAlike:
        """Returns what encodes the responses to that request; every output has a size of its own. From any thread.

        Args:
          count: outputs that each response has, those that nobody asked for among them.
        """
        if self._pieces is None:
            sizes = [math.prod(shape) * DTYPES[datatype].itemsize for _, datatype, shape in self.described]
            byte_size = response_byte_size(tuple([bytes(size) for size in sizes]))
            self._pieces = (*answer_pieces(self.numbered.number, sizes), byte_size)
        head, at, behind, byte_size = self._pieces
        head = head[:at] + request_id.to_bytes(8) + head[at + 8 :]
        return ResponsesAlike(self, head, behind, count, byte_size)

    def __repr__(self) -> str:
        return f"<ResponseKind {self.numbered.number} {self.described}>"


class ResponsesAlike:
    """Encodes the responses to one request that are of one kind."""

    __slots__ = ("_count", "_head", "_parts", "byte_size", "kind")

    def __init__(self, kind: ResponseKind, head: bytes, behind: Sequence[bytes], count: int, byte_size: int) -> None:
        """
        Args:
          head, behind: what stands before the outputs, and what follows each.
          count: outputs that each has, those that nobody asked for among them.
          byte_size: what each counts where those are bounded that a client has not taken.
        """
        self.kind = kind
        self.byte_size = byte_size
        self._count = count
        self._head = head
        self._parts = [
            (name, DTYPES[datatype], shape, follows)
            for (name, datatype, shape), follows in zip(kind.described, behind, strict=True)
        ]

    def join(self, contents: Iterable[bytes]) -> bytes:
        """Encodes a response of this kind. ``contents``: the bytes of each output."""
        pieces = [self._head]
        for content, (_, _, _, follows) in zip(contents, self._parts, strict=True):
            pieces += (content, follows)
        return b"".join(pieces)

    def record(self, result: Mapping[str, Array]) -> bytes | None:
        """Encodes a response. None: it is of another kind."""
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


class EncodedResponses:
    """Responses to one request, alike and one after the other, that whoever sends them has made ready for the lane; none of
    them the last one. While the loop has not come for them others join them.
    """

    __slots__ = ("_records", "alike", "taken")

    def __init__(self, alike: ResponsesAlike, record: bytes) -> None:
        self.alike = alike
        self._records = [record]
        #: The loop has come for them, or is about to.
        self.taken = False

    def join(self, record: bytes) -> bool:
        """Adds a record. Returns False if the loop may not have seen it, and the responses have to be put again."""
        self._records.append(record)
        return not self.taken

    def take(self) -> list[bytes]:
        """Returns the records that the loop has not taken yet; for the loop."""
        # Said before it looks: whoever adds one looks afterwards.
        self.taken = True
        records = self._records[:]
        del self._records[: len(records)]
        return records

    def __repr__(self) -> str:
        return f"<EncodedResponses {len(self._records)} of {self.alike!r}>"
