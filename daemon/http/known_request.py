"""An inference request that repeats itself: the same JSON with other tensors behind it, and what its answer looks like. Sans-I/O.

    chunk    | head | JSON, as last time | part | part | ...       parts of the same sizes, so they lie at the same places
    answer   | head and JSON, as last time | part | ...            while the outputs have the same names, datatypes and shapes

The same text means the same, so neither is read or written again.
"""

from __future__ import annotations

from daemon.http.decoded_request import DecodedRequest, Part
from daemon.http.response_codec import encode, response_head
from shm.messages import Completion, Inline, RegionSlice, Slice, Tensor

#: Longer texts are not worth remembering with every connection.
_MAX_TEXT = 2048
#: Longer answers to them neither.
_MAX_ANSWER_HEAD = 2048


class KnownRequest:
    """One connection's. Its tensors travel in the record or lie in regions."""

    __slots__ = ("_answer", "_answered", "_inputs", "_parts", "decoded", "model", "text")

    def __init__(
        self,
        model: str,
        text: bytes,
        decoded: DecodedRequest,
        parts: list[tuple[str, str, tuple[int, ...], RegionSlice | None, int, int]],
    ) -> None:
        self.model = model
        self.text = text
        self.decoded = decoded
        #: Name, datatype, shape, region, or where in the chunk it begins and ends.
        self._parts = parts
        #: The inputs themselves, where all of them lie in regions.
        self._inputs: tuple[Tensor, ...] | None = None
        if all(region is not None for _, _, _, region, _, _ in parts):
            self._inputs = self.inputs(b"")
        #: What the last answer was: its version and outputs, and the bytes before its parts.
        self._answered: tuple[int, list[tuple[str, str, tuple[int, ...], int]]] = (-1, [])
        self._answer = b""

    def inputs(self, chunk: bytes) -> tuple[Tensor, ...]:
        """The inputs of the request that is that chunk."""
        if self._inputs is not None:
            return self._inputs
        return tuple(
            [
                Tensor(name, datatype, shape, region or Inline(chunk[start:end]))
                for name, datatype, shape, region, start, end in self._parts
            ]
        )

    def answer(self, completion: Completion) -> bytes | None:
        """The whole answer of a connection that stays; None: it is not of a kind that is remembered."""
        version, outputs = self._answered
        if completion.lease is not None or completion.parameters:
            return None
        if completion.version == version and len(completion.outputs) == len(outputs):
            pieces = [self._answer]
            for tensor, (name, datatype, shape, byte_size) in zip(completion.outputs, outputs, strict=True):
                place = tensor.place
                if tensor.name != name or tensor.datatype != datatype or tensor.shape != shape:
                    break
                if type(place) is Inline:
                    if len(place.content) != byte_size:
                        break
                    pieces.append(place.content)
                elif byte_size >= 0:
                    break
            else:
                return b"".join(pieces)
        return self._learn(completion)

    def _learn(self, completion: Completion) -> bytes | None:
        decoded = self.decoded
        outputs = []
        for tensor in completion.outputs:
            place = tensor.place
            if type(place) is Inline and decoded.binary.get(tensor.name, decoded.all_binary):
                outputs.append((tensor.name, tensor.datatype, tensor.shape, len(place.content)))
            elif type(place) is RegionSlice:
                outputs.append((tensor.name, tensor.datatype, tensor.shape, -1))
            else:
                return None  # its values are in the JSON
        text, parts = encode(completion, self.model, decoded.id, decoded.binary, decoded.all_binary, _no_view)
        head = response_head(len(text), parts) + text
        if len(head) <= _MAX_ANSWER_HEAD:
            self._answered, self._answer = (completion.version, outputs), head
        return b"".join((head, *parts))


def _no_view(place: Slice) -> memoryview:
    raise AssertionError(f"{place} in an answer without a lease")


def recognise(
    text: bytes, start: int, model: str, decoded: DecodedRequest, inline_byte_size: int
) -> KnownRequest | None:
    """What to remember of a request to ``model`` whose JSON is ``text`` and whose parts begin at ``start`` of its chunk.

    None: it has tensors that come in the JSON, or are too large to travel in the record.
    """
    if len(text) > _MAX_TEXT:
        return None
    parts: list[tuple[str, str, tuple[int, ...], RegionSlice | None, int, int]] = []
    for name, datatype, shape, source in decoded.inputs:
        if isinstance(source, RegionSlice):
            parts.append((name, datatype, shape, source, 0, 0))
        elif isinstance(source, Part) and source.byte_size <= inline_byte_size:
            begin = start + source.offset
            parts.append((name, datatype, shape, None, begin, begin + source.byte_size))
        else:
            return None
    return KnownRequest(model, text, decoded, parts)
