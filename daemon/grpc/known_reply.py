"""Answers that are known (``known_answer``), written at once where nothing is in their way. All others are ``Reply``'s."""

from __future__ import annotations

from collections.abc import Callable

from daemon.grpc import frames
from daemon.grpc.known_answer import KnownAnswer, View
from daemon.grpc.reply import Reply
from shm.messages import Content


class KnownReply(Reply):
    """What one call is answered."""

    def answer_known(self, known: KnownAnswer, client_id: bytes, contents: tuple[bytes, ...]) -> bool:
        """The same of a known answer, unless something is in its way. False: nothing was done."""
        connection, framed = self.connection, known.framed
        if (
            framed > connection.send_window
            or framed > self.send_window
            or framed > connection.small
            or self._finished
            or self._head_sent
        ):
            return False
        connection.send_window -= framed
        connection.write(known.unary(frames.number(self.id), client_id, contents))
        self._finished = True
        self._close()
        return True

    def send_known(self, known: KnownAnswer, client_id: bytes, contents: tuple[bytes, ...]) -> bool:
        """A known message of a stream, unless something is in its way. False: nothing was done."""
        connection, framed = self.connection, known.framed
        if (
            framed > connection.send_window
            or framed > self.send_window
            or framed > connection.small
            or framed > connection.room
            or self._unsent
            or self._finished
            or not self._head_sent
        ):
            return False
        self.send_window -= framed
        connection.send_window -= framed
        connection.answered += 1
        connection.write(known.streamed(frames.number(self.id), client_id, contents))
        return True

    def answer_lent(
        self,
        known: KnownAnswer,
        client_id: bytes,
        contents: tuple[Content, ...],
        view: View,
        on_sent: Callable[[], None],
    ) -> bool:
        """``answer`` of a known answer in a lease, unless something is in its way. False, or an error: nothing was done.

        Args:
          view: of its tensors in the lease.
          on_sent: the lease is not looked at any more.
        """
        if self._head_sent or not self._takes_lent(known.framed):
            return False
        written = known.unary(frames.number(self.id), client_id, known.inside(contents))
        pieces = known.around(written, contents, view)
        connection = self.connection
        connection.send_window -= known.framed
        connection.sent += known.framed
        connection.write_lent(pieces, on_sent)
        self._finished = True
        self._close()
        return True

    def send_lent(
        self,
        known: KnownAnswer,
        client_id: bytes,
        contents: tuple[Content, ...],
        view: View,
        on_sent: Callable[[], None],
    ) -> bool:
        """The same of a message of a stream."""
        framed = known.framed
        if self._unsent or not self._head_sent or not self._takes_lent(framed):
            return False
        written = known.streamed(frames.number(self.id), client_id, known.inside(contents))
        pieces = known.around(written, contents, view)
        connection = self.connection
        self.send_window -= framed
        connection.send_window -= framed
        connection.answered += 1
        connection.sent += framed
        connection.write_lent(pieces, on_sent)
        return True

    def _takes_lent(self, framed: int) -> bool:
        """Whether so much DATA can leave at once, in one frame and as it lies."""
        connection = self.connection
        return not (
            framed > connection.send_window
            or framed > self.send_window
            or framed > connection.max_frame_size
            or framed > connection.room
            or self._finished
            or connection.serving.compression
            # TLS copies.
            or not connection.is_plain
        )
