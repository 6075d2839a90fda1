"""Encodes small responses with the same outputs: only the first of them has to be examined.

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
    """Returns (name, datatype, shape) of each requested output of a response, and the bytes of each.

    Args:
      wanted: names of the requested outputs; empty: all.
      most: bytes that fit into a record.
      strings: whether BYTES outputs are allowed, whose size differs from response to response.
    Returns: None if the outputs do not fit into a record, or if one has a datatype that is not allowed.
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
    """Small responses of one model version to one submitter that have the same output datatypes and shapes."""

    __slots__ = ("_pieces", "described", "numbered")

    def __init__(self, numbered: Numbered[PreparedAnswer], described: Described) -> None:
        self.numbered = numbered
        self.described = described
        #: Of its answers (``answer_pieces``), and what each counts while its client has not taken it.
        self._pieces: tuple[bytes, int, list[bytes], int] | None = None

    def alike(self, request_id: int, count: int) -> ResponsesAlike:
        """Returns an encoder for responses to one request with these datatypes (none is BYTES) and shapes. For any thread.

        Args:
          count: how many outputs the model makes for each response, including those that were not requested.
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
    """Encodes responses to one request that have the same output datatypes and shapes (``ResponseKind``)."""

    __slots__ = ("_count", "_head", "_parts", "byte_size", "kind")

    def __init__(self, kind: ResponseKind, head: bytes, behind: Sequence[bytes], count: int, byte_size: int) -> None:
        """
        Args:
          head, behind: the bytes of a record before its outputs, and the bytes that follow each output.
          count: how many outputs the model makes for each response, including those that were not requested.
          byte_size: bytes that each response counts for until the client has taken it.
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
        """Returns the record of a response with outputs of these datatypes and shapes.

        ``contents``: the bytes of each output, in the order of ``ResponseKind.described``.
        """
        pieces = [self._head]
        for content, (_, _, _, follows) in zip(contents, self._parts, strict=True):
            pieces += (content, follows)
        return b"".join(pieces)

    def record(self, result: Mapping[str, Array]) -> bytes | None:
        """Returns the record of a response, or None if its outputs have other datatypes or shapes."""
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
    """Encoded responses to one request, on the way from the sending thread to the worker's loop.

    Their outputs all have the same datatypes and shapes.

    The sending thread adds records until the loop has taken them. The request's last response is never among them.
    """

    __slots__ = ("_records", "alike", "taken")

    def __init__(self, alike: ResponsesAlike, record: bytes) -> None:
        self.alike = alike
        self._records = [record]
        #: The loop has come for them, or is about to.
        self.taken = False

    def join(self, record: bytes) -> bool:
        """Adds the record of one more response; called by the sending thread.

        Returns False if the loop may have taken the records before: the caller must then put this object to the loop again.
        """
        self._records.append(record)
        return not self.taken

    def take(self) -> list[bytes]:
        """Returns the records that the loop has not taken yet. Called by the loop."""
        # Said before it looks: whoever adds one looks afterwards.
        self.taken = True
        records = self._records[:]
        del self._records[: len(records)]
        return records

    def __repr__(self) -> str:
        return f"<EncodedResponses {len(self._records)} of {self.alike!r}>"
