"""Keeps the steps of each sequence on a connection in order: unary requests that are not with a worker yet go there one by one.

    a large message arrives, or waits for room ─▶ enter ─▶ leave: sent ─▶ those behind it, of its sequence, go on
                                                            ╰─ it will not be: they are refused, because they would miss it
    a step that is whole, of such a sequence   ─▶ waits

Steps are ordered by when their calls began. While no large message is arriving or waiting for room, no step is looked at.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from tensord.daemon.grpc.walk import fields
from tensord.protocol import grpc_service_pb2
from tensord.shm.messages import Buffer, SequenceId

if TYPE_CHECKING:
    from tensord.daemon.grpc.unary_infer import UnaryInfer

#: Model and correlation id.
Sequence = tuple[str, SequenceId]
#: A message says before that of which sequence it is; clients write tensors last.
_MAX_BEGINNING = 4096
_MODEL, _PARAMETER = 0x0A, 0x22


class StepOrder:
    """Keeps the unary calls of one connection whose requests are not with a worker yet, in the order in which they began."""

    __slots__ = ("_broken", "_due", "_loop", "unsent")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        #: In their order; whether each is whole and waits for one before it.
        self.unsent: dict[UnaryInfer, bool] = {}
        #: Sequences of which one has left that will not be sent.
        self._broken: set[Sequence] = set()
        self._due = False

    def enter(self, step: UnaryInfer) -> None:
        """Adds a call that may be a step of a sequence and whose request cannot be sent to a worker at once."""
        self.unsent[step] = False

    def waits(self, step: UnaryInfer) -> bool:
        """Returns whether a complete request must wait for an earlier step of its sequence.

        If so, its ``resume`` or ``miss`` is called later.
        """
        if next(iter(self.unsent)) is step or (sequence := step.sequence) is None:
            return False
        for other in self.unsent:
            if other is step:
                return False
            if other.sequence == sequence:
                self.unsent[step] = True
                return True
        return False

    def leave(self, step: UnaryInfer, sent: bool) -> None:
        """Removes a call whose request was sent to a worker (``sent``), or never will be.

        Does nothing if the call is not here.
        """
        if self.unsent.pop(step, None) is None or not self.unsent:
            return
        if not sent and step.sequence is not None:
            self._broken.add(step.sequence)
        if not self._due:
            self._due = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        ahead: set[Sequence] = set()
        for step, waiting in list(self.unsent.items()):
            sequence = step.sequence
            if sequence is None or step not in self.unsent:
                continue
            if waiting and sequence not in ahead:
                if sequence in self._broken:
                    del self.unsent[step]
                    step.miss(sequence)
                else:
                    step.resume()
            if step in self.unsent:
                ahead.add(sequence)
        self._broken.clear()
        self._due = False

    def __repr__(self) -> str:
        return f"<StepOrder {len(self.unsent)} are not sent>"


def sequence_of(message: Buffer | bytearray) -> Sequence | None:
    """Returns the sequence (model and id) of a possibly incomplete message; None: it has none, or its id has not arrived."""
    said = b""
    for tag, start, begin, size in fields(message, min(len(message), _MAX_BEGINNING)):
        if tag in (_MODEL, _PARAMETER):
            said += message[start : begin + size]
    try:
        request = grpc_service_pb2.ModelInferRequest.FromString(said)
    except DecodeError:
        return None
    if "sequence_id" not in request.parameters:
        return None
    value = request.parameters["sequence_id"]
    sequence_id: SequenceId = value.string_param or value.uint64_param or value.int64_param % (1 << 64)
    return (request.model_name, sequence_id) if sequence_id else None
