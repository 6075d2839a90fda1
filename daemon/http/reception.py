"""Receives the body of one request: where it goes, what it may take, and when it is there.

begin ─▶ receive, receive, ... ─▶ complete ─▶ ready: whole, inflated and placed
           │ compressed: inflated in steps, in turns of the loop            │ or refused, with ``error``
           ╰ waits for room in the arena: the socket is not read meanwhile ─╯
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tensord.daemon.front.receiver import Receiver
from tensord.daemon.http.body import COLLECT_BYTE_SIZE, Body, CollectedBody, PlacedBody, TextBody
from tensord.daemon.http.compression import Inflation
from tensord.daemon.http.message_head import InferHead
from tensord.daemon.http.serving import HttpServing
from tensord.daemon.submit.accounts import Account
from tensord.shm.arena import Lease
from tensord.shm.errors import InvalidArgument, ServingError, Unavailable
from tensord.shm.refusals import Refusal

#: Larger JSON of known length goes straight into memory of its own.
COLLECT_JSON_BYTE_SIZE = 64 << 10
#: Until it begins.
_NO_BODY = CollectedBody()


class Reception(Receiver):
    """Receives one HTTP body; owns it and its memory until ``leave`` or ``drop``.

    Args:
      pause: stop (True) and go on (False) reading from the socket.
      progressed: it may have become ``ready`` outside of a call of its owner's.
      account: whose memory it takes.
    """

    #: What is wrong with the request; the rest of its body is only counted.
    error: ServingError | None = None
    #: Bytes that this body has added to ``HttpServing.collected_byte_size``.
    _collected_byte_size = 0
    #: Of a compressed body, and whether its next step is due.
    _inflation: Inflation | None = None
    _inflating = False
    _whole = False

    def __init__(
        self,
        serving: HttpServing,
        head: InferHead,
        pause: Callable[[bool], None],
        progressed: Callable[[], None],
        account: Account | None = None,
    ) -> None:
        super().__init__(serving.submitter, head.model, account)
        self._serving = serving
        self._head = head
        self._pause = pause
        self._on_progress = progressed
        self.body: Body = _NO_BODY

    @property
    def ready(self) -> bool:
        """Returns whether the body is complete, inflated and placed."""
        return self._whole and not self._inflating and not self.waits_for_room

    @property
    def received(self) -> int:
        """Counts the bytes of the body that came, as they came."""
        return self.body.received if self._inflation is None else self._inflation.received

    # ---------------------------------------------------------------------------------------------------------- place

    def begin(self) -> None:
        """Prepares memory for the body. Raises InvalidArgument, Unavailable: it cannot be as large as its head says."""
        length, json_size = self._head.content_length, self._head.json_size
        limit = self._serving.options.http.max_body_byte_size
        self.body = body = CollectedBody(limit)
        if self._head.coding:
            self._inflation = Inflation(self._head.coding, body, limit)
            return
        if json_size is not None and length is not None and not 0 <= json_size <= length:
            raise InvalidArgument(f"inference header size should be in range (0, {length}), got: {json_size}")
        if length is not None and json_size is not None and length > COLLECT_BYTE_SIZE:
            if not self._ask_for_room(PlacedBody.lease_size(length)):
                self._pause(True)
        elif length is not None and json_size is None and length > COLLECT_JSON_BYTE_SIZE:
            self.body = TextBody(length, self._grown)

    def begin_now(self) -> PlacedBody | None:
        """Begins to receive a large binary body. Returns None, with no effect, if there is no room now."""
        length = self._head.content_length
        assert length is not None
        if not self._ask_for_room(PlacedBody.lease_size(length), waits=False):
            return None
        assert isinstance(self.body, PlacedBody)
        return self.body

    def _place(self, lease: Lease) -> None:
        length, json_size = self._head.content_length, self._head.json_size
        assert length is not None
        assert json_size is not None
        body = PlacedBody(lease, length, json_size)
        if isinstance(self.body, CollectedBody):
            body.write(self.body.whole())
        self._drop_collected()
        self.body = body

    def _refuse(self, error: ServingError) -> None:
        self.error = error

    def _progressed(self) -> None:
        self._pause(False)
        self._on_progress()

    def _collect(self, byte_size: int) -> None:
        """Counts bytes kept in ordinary memory. Raises Unavailable: all connections together would keep too many."""
        serving, limit = self._serving, self._serving.options.http.max_collected_byte_size
        if serving.collected_byte_size + byte_size > limit:
            serving.submitter.refusals.note(self._head.model, Refusal.BODIES)
            raise Unavailable(
                f"{serving.collected_byte_size} bytes of request bodies are being collected and {byte_size} more came, "
                f"at most {limit} are allowed"
            )
        serving.collected_byte_size += byte_size
        self._collected_byte_size += byte_size

    def _grown(self, byte_size: int) -> bool:
        """Counts more bytes of a text. Returns False if they exceed the limit, and the text is dropped."""
        if self.error is None and not self._dropped:
            try:
                self._collect(byte_size)
            except ServingError as error:
                self.error = error
                self._drop_collected()
        return self.error is None and not self._dropped

    # -------------------------------------------------------------------------------------------------------- receive

    def receive(self, chunk: bytes) -> None:
        """Takes a piece of the body; of a refused request it is only counted."""
        if self._inflation is not None:
            self._inflation.feed(chunk) if self.error is None else self._inflation.skip(chunk)
            if not self._inflating:
                self._inflate()
            return
        body, byte_size = self.body, len(chunk)
        if type(body) is CollectedBody and body.received + byte_size > COLLECT_BYTE_SIZE and self.error is None:
            try:
                self._collect(body.received + byte_size - self._collected_byte_size)
            except ServingError as error:
                self.error = error
                self.drop_body()
                self.body.received = body.received
        if self.error is None or isinstance(self.body, TextBody):
            self.body.write(chunk)
        else:
            self.body.received += byte_size

    def complete(self) -> None:
        """Notes that the body is whole."""
        self._whole = True
        if self._lease is not None:
            self._serving.submitter.arrived(self._lease)
        if self._inflation is not None and not self._inflating:
            self._inflate()

    def _inflate(self) -> None:
        """Inflates a limited amount; the rest follows in later iterations of the loop, while reading is paused."""
        was_inflating, self._inflating = self._inflating, False
        if self._dropped or self._inflation is None:
            return
        try:
            more = self.error is None and self._inflation.step()
            if self.error is None and self.body.received > COLLECT_BYTE_SIZE:
                self._collect(self.body.received - self._collected_byte_size)
            if more:
                self._inflating = True
                if not was_inflating:
                    self._pause(True)
                asyncio.get_running_loop().call_soon(self._inflate)
                return
            if self.error is None and self._whole:
                self._inflation.finish()
        except ServingError as error:
            self._inflation.drop()
            self.error, self.body = error, CollectedBody()
            self._drop_collected()
        if was_inflating:
            self._pause(False)
        self._on_progress()

    # ----------------------------------------------------------------------------------------------------------- leave

    def leave(self) -> tuple[Lease, ...]:
        """Ends the reception of a request that was sent: frees collected memory, and hands over the lease.

        Returns: where the body lies in the arena; from now on the caller gives that back.
        """
        if self._collected_byte_size:
            self.drop_body()
        lease = self.take_lease()
        return () if lease is None else (lease,)

    def drop_body(self) -> None:
        """Drops a body that nobody reads any more."""
        if self._collected_byte_size:
            self.body, self._inflation = CollectedBody(), None
            self._drop_collected()

    def drop(self) -> None:
        if self.waits_for_room:
            self._pause(False)
        self._drop_collected()
        if self._inflation is not None:
            self._inflation.drop()
        if isinstance(self.body, TextBody):
            # It and this reception know each other, so neither goes by itself.
            self.body.drop()
        super().drop()

    def _drop_collected(self) -> None:
        self._serving.collected_byte_size -= self._collected_byte_size
        self._collected_byte_size = 0
