"""Receives the body of one HTTP request into memory, and decompresses a compressed body.

A compressed body is decompressed in steps, one in each iteration of the event loop. While a body waits for arena memory or for
its next step, the front does not read from the client's socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tensord.daemon.front.large_body import Receiver
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


class Reception(Receiver):
    """Receives the body of one HTTP request, and owns the body's memory until ``leave`` or ``drop`` is called.

    Args:
      pause: called with True to stop reading from the client's socket, and with False to resume reading.
      progressed: called when ``ready`` may have become True.
      account: counts the memory of the body. If it is None, the memory is not counted.
    """

    #: The error to answer the request with, after which the rest of its body is only counted; None: none so far.
    error: ServingError | None = None
    #: Bytes that this body has added to ``HttpServing.collected_byte_size``.
    _collected_byte_size = 0
    #: Decompresses a compressed body; ``_inflating``: its next step is scheduled.
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
        self._submitter, self._model, self._account = serving.submitter, head.model, account
        self._serving = serving
        self._head = head
        self._pause = pause
        self._on_progress = progressed
        #: Its own from the start: also the bytes of a request that is refused before ``begin`` are counted here.
        self.body: Body = CollectedBody()

    @property
    def ready(self) -> bool:
        """Returns True if the whole body has arrived, is decompressed, and has got its arena memory."""
        return self._whole and not self._inflating and not self.waits_for_room

    @property
    def received(self) -> int:
        """Returns how many bytes of the body have been received. A compressed body counts in compressed bytes."""
        return self.body.received if self._inflation is None else self._inflation.received

    # ---------------------------------------------------------------------------------------------------------- place

    def begin(self) -> None:
        """Prepares memory for a request's body. Pauses reading from the client's socket while the front's arena has no room.

        Raises InvalidArgument if the head says that the JSON is longer than the body, or if the arena can never hold the body.
        Raises Unavailable if the host has no memory left.
        """
        length, json_size = self._head.content_length, self._head.json_size
        limit = self._serving.options.http.max_body_byte_size
        self.body = body = CollectedBody(limit)
        if self._head.coding:
            self._inflation = Inflation(self._head.coding, body, limit)
            return
        if json_size is not None and length is not None and not 0 <= json_size <= length:
            raise InvalidArgument(f"inference header size should be in range (0, {length}), got: {json_size}")
        if length is not None and json_size is not None and length > COLLECT_BYTE_SIZE:
            if self.begin_now() is None:
                self._wait_for_room(PlacedBody.lease_size(length))
                self._pause(True)
        elif length is not None and json_size is None and length > COLLECT_JSON_BYTE_SIZE:
            self.body = TextBody(length, self._grown)

    def begin_now(self) -> PlacedBody | None:
        """Reserves arena memory for the whole request body, and returns the object that writes the body into this memory.

        Returns None, without effect, if no memory can be reserved now. The HTTP head must give the lengths of body and JSON.
        Raises InvalidArgument if the arena can never hold the body. Raises Unavailable if the host has no memory left.
        """
        length = self._head.content_length
        assert length is not None
        lease = self._submitter.loan(PlacedBody.lease_size(length), self._account, True)
        if lease is None:
            return None
        self._place(lease)
        assert isinstance(self.body, PlacedBody)
        return self.body

    def _place(self, lease: Lease) -> None:
        self._lease = lease
        length, json_size = self._head.content_length, self._head.json_size
        assert length is not None
        assert json_size is not None
        body = PlacedBody(lease, length, json_size)
        if isinstance(self.body, CollectedBody):
            body.write(self.body.whole())
        self._drop_collected()
        self.body = body

    def refuse(self, error: ServingError) -> None:
        """Stores the error with which the request will be answered. Bytes of the body that still arrive are discarded."""
        # What it was raised through refers to this reception, and would keep the bytes that came until garbage is collected.
        error.__context__ = error.__cause__ = None
        self.error = error.with_traceback(None)

    def _progressed(self) -> None:
        self._pause(False)
        self._on_progress()

    def _collect(self, byte_size: int) -> None:
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
        if self.error is None and not self._dropped:
            try:
                self._collect(byte_size)
            except ServingError as error:
                self.refuse(error)
                self._drop_collected()
        return self.error is None and not self._dropped

    # -------------------------------------------------------------------------------------------------------- receive

    def receive(self, chunk: bytes) -> None:
        """Receives ``chunk``, a piece of the body. If the request is refused, the piece is counted and discarded."""
        if self._inflation is not None:
            if self.error is None:
                self._inflation.feed(chunk)
            else:
                self._inflation.received += len(chunk)
            if not self._inflating:
                self._inflate()
            return
        body, byte_size = self.body, len(chunk)
        if type(body) is CollectedBody and body.received + byte_size > COLLECT_BYTE_SIZE and self.error is None:
            try:
                self._collect(body.received + byte_size - self._collected_byte_size)
            except ServingError as error:
                self.refuse(error)
                self.drop_body()
                self.body.received = body.received
        if self.error is None or isinstance(self.body, TextBody):
            self.body.write(chunk)
        else:
            self.body.received += byte_size

    def complete(self) -> None:
        """Notes that the whole body has been received."""
        self._whole = True
        if self._lease is not None:
            self._serving.submitter.arrived(self._lease)
        if self._inflation is not None and not self._inflating:
            self._inflate()

    def _inflate(self) -> None:
        """Decompresses a limited part of the body, and schedules the rest."""
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
            self.refuse(error)
            self.body = CollectedBody()
            self._drop_collected()
        if was_inflating:
            self._pause(False)
        self._on_progress()

    # ----------------------------------------------------------------------------------------------------------- leave

    def leave(self) -> tuple[Lease, ...]:
        """Ends the reception and returns the lease of the memory that holds the body's tensors, or () if they need no memory."""
        if self._collected_byte_size:
            self.drop_body()
        lease = self.take_lease()
        return () if lease is None else (lease,)

    def drop_body(self) -> None:
        """Frees the memory in which the request's body was collected, because nobody will read the body."""
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
