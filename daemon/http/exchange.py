"""One inference request and its answer, on the short way past ASGI: no task, no queue, no event.

    head ─▶ body (reception) ─▶ decode (request_codec) ─▶ submit ─▶ completion ─▶ encode (response_codec) ─▶ socket

Each arrow is a call from the connection's or the lane's callback. The connection (protocol.py) keeps exchanges in the order in
which their requests came, so an answer is written only by the exchange whose turn it is.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable

from daemon.http import placement, response_codec
from daemon.http.body import PlacedBody
from daemon.http.compression import BodyTooLarge, Deflation
from daemon.http.conversions import Job
from daemon.http.decoded_request import DecodedRequest
from daemon.http.message_head import InferHead
from daemon.http.raw_request import decode_raw
from daemon.http.reception import Reception
from daemon.http.serving import Serving
from daemon.status import http_status
from daemon.tracer import Trace
from shm.arena import Lease
from shm.errors import InvalidArgument, ServingError, Unsupported
from shm.lane import SubmitterLane
from shm.messages import Completion, Submit, Tensor

_log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where an exchange stands."""

    #: The body is arriving.
    RECEIVING = "receiving"
    #: The body is whole, and it is not this exchange's turn, or its tensors wait for room.
    RECEIVED = "received"
    #: A worker has it.
    SUBMITTED = "submitted"
    #: The answer is written; a part of it may still be in the transport's buffer.
    ANSWERED = "answered"


class Exchange:
    """One inference request and its answer.

    Args:
      write: takes the pieces of an answer; returns whether they are all out (else ``written`` is called later).
      done: the answer was handed over: the connection's next exchange may answer.
      pause: stop (True) and go on (False) reading from the socket.
    """

    def __init__(
        self,
        serving: Serving,
        head: InferHead,
        write: Callable[[list[response_codec.Buffer]], bool],
        done: Callable[[], None],
        pause: Callable[[bool], None],
    ) -> None:
        self._serving = serving
        self._head = head
        self._write = write
        self._done = done
        self.reception = Reception(serving, head, pause, self._go_on)
        self.keep_alive = head.keep_alive
        self.phase = Phase.RECEIVING
        self._my_turn = False
        self._gone = False
        #: Where tensors lie that did not come in the body's own lease.
        self._leases: list[Lease] = []
        self._job: Job | None = None
        self._request_id = 0
        self._decoded: DecodedRequest | None = None
        #: The response lease whose bytes the transport still holds.
        self._unwritten: tuple[SubmitterLane, tuple[int, int, int]] | None = None
        #: Of an answer that is being compressed.
        self._deflation: Deflation | None = None
        #: Where the request is a sampled one.
        self._trace: Trace | None = None

    # -------------------------------------------------------------------------------------------------- body

    def begin(self) -> None:
        """The head is complete: prepare a place for the body."""
        try:
            if self._head.error is not None:
                raise self._head.error
            if self._serving.table.find(self._head.model, self._head.version).decoupled:
                raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
            tracer = self._serving.tracer
            if tracer is not None and tracer.on:
                self._trace = tracer.sample(self._head.model)
                if self._trace is not None:
                    self._trace.stamp("HTTP_RECV_START")
            self.reception.begin()
        except ServingError as error:
            self.reception.error = error

    @property
    def refused(self) -> bool:
        """Whether the answer is an error already, so that the rest of the body need not come."""
        return self.reception.error is not None

    def complete(self) -> None:
        """The body is whole."""
        if self._trace is not None:
            self._trace.stamp("HTTP_RECV_END")
        self.phase = Phase.RECEIVED
        self.reception.complete()
        self._go_on()

    def take_turn(self) -> None:
        """Every earlier exchange of this connection is answered."""
        self._my_turn = True
        self._go_on()

    # ------------------------------------------------------------------------------------------------ submit

    def _go_on(self) -> None:
        """Submits once the body is whole and placed and it is our turn."""
        if self._gone or not (self._my_turn and self.phase is Phase.RECEIVED and self.reception.ready):
            return
        try:
            if self.reception.error is not None:
                raise self.reception.error
            self._submit(self._decode())
        except BodyTooLarge as error:
            self._answer_error(413, error.message)
        except ServingError as error:
            self._answer_error(http_status(error), error.message)
        except Exception:
            self._answer_defect()

    def _decode(self) -> DecodedRequest:
        json_size, body = self._head.json_size, self.reception.body
        if isinstance(body, PlacedBody):
            assert json_size is not None
            if json_size == 0:
                return self._raw(body.head(body.received))
            return self._serving.recognised.decode(body.head(json_size), body.received - json_size, self._head.model)
        whole = body.whole()
        if json_size is None:
            return self._serving.recognised.decode(whole, 0, self._head.model)
        if json_size > len(whole):
            raise InvalidArgument(f"inference header size should be in range (0, {len(whole)}), got: {json_size}")
        if json_size == 0:
            return self._raw(whole)
        return self._serving.recognised.decode(whole[:json_size], len(whole) - json_size, self._head.model)

    def _raw(self, body: bytes | memoryview) -> DecodedRequest:
        return decode_raw(self._serving.table.find(self._head.model, self._head.version), body)

    def _submit(self, decoded: DecodedRequest) -> None:
        self._decoded = decoded
        size = placement.room(decoded, self.reception.body, self._serving.submitter.inline_byte_size)
        if size == 0:
            self._place(decoded, None)
            return
        lease = self._serving.submitter.loan(size)
        if lease is not None:
            self._place(decoded, lease)
            return

        def granted(lease: Lease | ServingError) -> None:
            if not isinstance(lease, ServingError) and self._gone:
                self._serving.submitter.give_back(lease)
            elif not self._gone:
                self._answer_if_refused(self._place_granted, decoded, lease)

        self._serving.submitter.wait_for_room(size, granted)

    def _place_granted(self, decoded: DecodedRequest, lease: Lease | ServingError) -> None:
        if isinstance(lease, ServingError):
            raise lease
        self._place(decoded, lease)

    def _place(self, decoded: DecodedRequest, lease: Lease | None) -> None:
        if lease is not None:
            self._leases.append(lease)
        inline, json_size = self._serving.submitter.inline_byte_size, self._head.json_size or 0
        tensors = placement.place(decoded, self.reception.body, json_size, lease, inline)
        if lease is None or placement.is_filled(decoded):
            self._send(decoded, tensors)
            return

        def filled(tensors: tuple[Tensor, ...]) -> None:
            self._job = None
            self._answer_if_refused(self._send, decoded, tensors)

        self._job = self._serving.conversions.run(placement.fill(decoded, tensors, lease), filled, self._not_converted)

    def _not_converted(self, error: Exception) -> None:
        self._job = None
        self._answer_if_refused(_raise, error)

    def _answer_if_refused(self, step: Callable[..., None], *arguments: object) -> None:
        """Does the next step for a request whose caller is the loop and not the connection."""
        try:
            step(*arguments)
        except ServingError as error:
            self._answer_error(http_status(error), error.message)
        except Exception:
            self._answer_defect()

    def _send(self, decoded: DecodedRequest, inputs: tuple[Tensor, ...]) -> None:
        self.reception.drop_body()
        leases = [*self.reception.take_leases(), *self._leases]
        submitter = self._serving.submitter
        self._request_id = submitter.next_id()
        record = Submit(
            self._request_id,
            self._head.model,
            self._head.version,
            inputs,
            decoded.outputs,
            {**decoded.parameters, **self._head.forwarded} if self._head.forwarded else decoded.parameters,
            decoded.id,
            received_ns=time.monotonic_ns(),
            priority=decoded.priority,
            timeout_us=decoded.timeout_us,
            sequence_id=decoded.sequence_id,
            sequence_start=decoded.sequence_start,
            sequence_end=decoded.sequence_end,
            trace=0 if self._trace is None else self._trace.level,
        )
        if self._trace is not None:
            self._trace.client_id = decoded.id
            self._trace.stamp("REQUEST_START")
        self._leases = leases
        submitter.submit(record, leases, self._completed)
        self._leases = []
        self.phase = Phase.SUBMITTED

    # ------------------------------------------------------------------------------------------------ answer

    def _completed(self, completion: Completion, lane: SubmitterLane | None) -> None:
        self._request_id = 0
        if self._trace is not None:
            self._trace.completed(completion)
        if completion.code:
            self._answer_error(http_status(completion.code), completion.message)
            return
        assert lane is not None
        assert self._decoded is not None
        decoded = self._decoded
        if completion.lease is not None:
            self._unwritten = (lane, completion.lease)
            if response_codec.is_large(completion, decoded.binary, decoded.all_binary):
                steps = response_codec.encode_in_steps(
                    completion, self._head.model, decoded.id, decoded.binary, decoded.all_binary, lane.view
                )
                self._job = self._serving.conversions.run(steps, self._answer_converted, self._not_converted)
                return
        try:
            head, parts = response_codec.encode(
                completion, self._head.model, decoded.id, decoded.binary, decoded.all_binary, lane.view
            )
        except ServingError as error:
            self._answer_error(http_status(error), error.message)
            return
        except Exception:
            self._answer_defect()
            return
        self._answer([head], parts)

    def _answer_converted(self, answer: tuple[list[response_codec.Buffer], list[response_codec.Buffer]]) -> None:
        self._job = None
        head, parts = answer
        if not parts:
            self.written()  # the tensors are text now, and the transport holds that
        self._answer(head, parts)

    def _answer(self, head: list[response_codec.Buffer], parts: list[response_codec.Buffer]) -> None:
        json_size = len(head[0]) if len(head) == 1 else sum(map(len, head))
        if self._head.accepts:
            self._deflation = Deflation(self._head.accepts, (*head, *parts))
            self._deflate(self._deflation, json_size, bool(sum(map(len, parts))))
            return
        line = response_codec.response_head(json_size, parts, self._connection_line())
        self.phase = Phase.ANSWERED
        # Small pieces are cheaper joined; slices of the arena go to the socket as they lie.
        pieces: list[response_codec.Buffer] = [line, *head, *parts]
        if self._unwritten is None:
            pieces = [b"".join(pieces)]
        self._hand_over(pieces)

    def _hand_over(self, pieces: list[response_codec.Buffer]) -> None:
        """The answer goes to the connection, whole."""
        if self._trace is not None:
            self._trace.stamp("HTTP_SEND_START")
        if self._write(pieces):
            self.written()
        self._done()

    def _deflate(self, deflation: Deflation, json_size: int, binary: bool) -> None:
        """A step of it, and in the end the answer. The lease is given back then: the compressed bytes are our own."""
        if self._gone:
            return
        if deflation.step():
            asyncio.get_running_loop().call_soon(self._deflate, deflation, json_size, binary)
            return
        self.written()
        self.phase = Phase.ANSWERED
        body = b"".join(deflation.compressed)
        line = response_codec.compressed_head(
            json_size if binary else None, deflation.coding, len(body), self._connection_line()
        )
        self._hand_over([line + body])

    def _answer_error(self, status: int, message: str) -> None:
        self._give_back()
        self.written()
        self.phase = Phase.ANSWERED
        self._hand_over([response_codec.error_response(status, message, self._connection_line())])

    def _connection_line(self) -> bytes:
        return self._head.keep_alive_line if self.keep_alive else response_codec.CLOSE

    def _answer_defect(self) -> None:
        """Ours or a worker's, and no reason to leave a client without its answer."""
        _log.exception("a request for model '%s' met a defect of the server", self._head.model)
        self._answer_error(500, "internal error; the server's log has the details")

    def written(self) -> None:
        """The transport holds nothing of the answer any more."""
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            self._serving.submitter.release(*unwritten)
        if self._trace is not None and self.phase is Phase.ANSWERED:
            self._trace.stamp("HTTP_SEND_END")
            self._trace.end()
            self._trace = None

    def abandon(self) -> None:
        """The client is gone."""
        self._gone = True
        if self._job is not None:
            self._job.cancel()
            self._job = None
        if self._request_id:
            self._serving.submitter.cancel(self._request_id)
        self._give_back()
        if self._deflation is not None:
            self._deflation.drop()
        self.written()

    def _give_back(self) -> None:
        self.reception.drop()
        leases, self._leases = self._leases, []
        for lease in leases:
            self._serving.submitter.give_back(lease)


def _raise(error: Exception) -> None:
    raise error
