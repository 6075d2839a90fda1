"""A connection as its streams see it: ``connection.Connection`` is one. It knows its streams; they know only this of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from tensord.config.options import Grpc
from tensord.daemon.front.connection_end import ConnectionEnd
from tensord.daemon.grpc.step_order import StepOrder
from tensord.daemon.submit.accounts import Account
from tensord.shm.messages import Buffer


class Bounds(Protocol):
    """What holds for all connections together (``serving.Serving``)."""

    options: Grpc
    max_message: int
    max_collected: int
    #: Bytes of incomplete messages.
    collected: int
    #: zlib level of answers for clients that accept gzip; 0: none.
    compression: int


class Link(Protocol):
    """Where a stream's frames go. A stream that is named is the caller."""

    loop: asyncio.AbstractEventLoop
    connection_end: ConnectionEnd
    #: What its client holds of the arenas.
    account: Account | None
    #: Large requests that are not sent yet, and who waits for them.
    steps: StepOrder
    is_plain: bool
    #: What of an answer may leave now: by the client's window, its largest frame, and what the socket takes.
    send_window: int
    max_frame_size: int
    room: int
    #: What was sent so far.
    answered: int
    sent: int
    #: Streams that wait for the connection's window or for the socket.
    blocked: dict[int, Any]

    @property
    def serving(self) -> Bounds:
        """What holds for all connections."""

    def fileno(self) -> int:
        """The client's connection; -1: it is gone already."""

    def write(self, piece: Buffer) -> None:
        """Queues; everything of one turn of the loop leaves together."""

    def write_pieces(self, pieces: list[Buffer]) -> None:
        """Queues several, as they lie."""

    def when_written(self, on_written: Callable[[], None]) -> None:
        """Called when nothing that was written so far is looked at any more."""

    def cut(self, number: int, code: int) -> None:
        """Tells the client that nothing of that stream is looked at any more."""

    def reset(self, stream: Any, code: int) -> None:
        """Ends a stream over what its client did."""

    def grant(self, stream: Any) -> None:
        """The client may send again what was taken of it."""

    def grant_ahead(self, stream: Any, byte_size: int) -> None:
        """The client may send so much more of a message at once."""

    def stop_direct(self, stream: Any) -> None:
        """Nothing of the stream is read to its place any more."""

    def stream_ended(self, stream: Any) -> None:
        """Called once."""
