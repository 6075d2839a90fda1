"""Answers of one kind to messages of one form: what they have in common is written once, what is their own between it. Sans-I/O.

| model_name, model_version | id | parameters, outputs | raw tensor | raw tensor | ...
       written once                   written once
"""

from __future__ import annotations

from collections.abc import Callable

from tensord.daemon.grpc import response_codec
from tensord.shm.messages import Buffer, Content, PreparedAnswer, Slice, own_count


class AnswerForm:
    """How those are written."""

    __slots__ = ("_begin", "_owns", "_prepared", "_rest", "_whole")

    def __init__(self, prepared: PreparedAnswer, model: str, final: bool | None) -> None:
        """
        Args:
          prepared: what the answers have in common; it is kept.
          final: what ``triton_final_response`` says; None: not there, as in unary answers.
        """
        self._prepared = prepared
        empty = (b"",) * own_count(prepared.outputs)
        pieces = response_codec.encode(prepared, empty, model, "", _no_view, final)
        self._begin = bytes(pieces[0])
        self._rest = b"".join(pieces[1 : len(pieces) - 2 * len(prepared.outputs)])
        #: Without an id.
        self._whole = self._begin + self._rest
        #: Which outputs are in the answer; those that are not went to regions. None: all of them.
        owns = [tensor.region is None for tensor in prepared.outputs]
        self._owns = None if all(owns) else owns

    def pieces(
        self, client_id: bytes, contents: tuple[Content, ...], view: Callable[[Slice], memoryview]
    ) -> list[Buffer]:
        """A ModelInferResponse.

        Args:
          contents: the outputs that went to no region.
          view: the bytes of a slice of the response arena.
        """
        pieces: list[Buffer]
        if client_id:
            pieces = [self._begin, response_codec.field_start(0x1A, len(client_id)), client_id, self._rest]
        else:
            pieces = [self._whole]
        for content in contents if self._owns is None else self._with_regions(self._owns, contents):
            tensor: Buffer = view(content) if type(content) is Slice else content  # type: ignore[assignment]
            pieces += (response_codec.raw(len(tensor)), tensor)
        return pieces

    @staticmethod
    def _with_regions(owns: list[bool], contents: tuple[Content, ...]) -> list[Content]:
        """All outputs; one in a region has an empty entry, so that the indices agree."""
        own = iter(contents)
        return [next(own) if each else b"" for each in owns]


def _no_view(place: Slice) -> memoryview:
    raise AssertionError(f"{place} in an answer whose contents are not known")
