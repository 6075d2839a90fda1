"""One inference request, on the short way past ASGI: no task, no queue, no event. This is its incoming half.

    head ─▶ body (reception) ─▶ decode (request_codec) ─▶ submit ─▶ completion ─▶ encode (answering) ─▶ socket
     ╰────── known, with its JSON (known_text) ────────────▲

Each arrow is a call from the connection's or the lane's callback. The connection (protocol.py) keeps exchanges in the order in
which their requests came, so an answer is written only by the exchange whose turn it is.
"""

from __future__ import annotations

import dataclasses
import logging
from time import monotonic_ns

import msgspec

from daemon import request_id
from daemon.http import json_cut, placement, request_codec
from daemon.http.answering import Answering, Phase
from daemon.http.body import PlacedBody
from daemon.http.compression import BodyTooLarge
from daemon.http.decoded_request import DecodedRequest
from daemon.http.json_array import PIECE_BYTE_SIZE
from daemon.http.known_large_request import KnownLargeRequest
from daemon.http.known_request import KnownRequest
from daemon.http.raw_request import decode_raw
from daemon.http.reception import Reception
from daemon.status import http_status
from shm.arena import Lease
from shm.errors import InvalidArgument, ServingError, Unsupported
from shm.forms import whole_request
from shm.messages import Submit, Tensor

_log = logging.getLogger(__name__)


class Exchange(Answering):
    """One inference request and its answer."""

    #: From ``begin`` until the submitter has the tensors: each refers to the other, and requests shall leave the garbage
    #: collector nothing to do.
    _reception: Reception | None = None
    #: Instead of it, where the body is read for a request that is probably known.
    placed: PlacedBody | None = None
    _my_turn: bool = False
    #: Until it is sent: where tensors lie that did not come in the body's own leases.
    _leases: tuple[Lease, ...] = ()

    # -------------------------------------------------------------------------------------------------- body

    def begin(self) -> None:
        """The head is complete: prepare a place for the body."""
        reception = self._reception = Reception(self._serving, self._head, self._outlet.pause_body, self._go_on)
        try:
            if self._head.error is not None:
                raise self._head.error
            self._admit()
            reception.begin()
        except ServingError as error:
            reception.error = error

    def _admit(self) -> None:
        """Raises NotFound, Unsupported: there is no such model for HTTP."""
        if self._serving.table.find(self._head.model, self._head.version).decoupled:
            raise Unsupported("HTTP end point doesn't support models with decoupled transaction policy")
        tracer = self._serving.tracer
        if tracer is not None and tracer.on:
            self._trace = tracer.sample(self._head.model)
            if self._trace is not None:
                self._trace.stamp("HTTP_RECV_START")

    @property
    def reception(self) -> Reception:
        """The body that is arriving."""
        assert self._reception is not None
        return self._reception

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

    def repeat(self, known: KnownRequest, chunk: bytes) -> None:
        """Instead of all these: the request is that chunk, whole, known but for its tensors, and it is its turn."""
        serving = self._serving
        tracer = serving.tracer
        try:
            if known.edition != serving.table.edition or (tracer is not None and tracer.on):
                self._admit()
                known.admitted(serving.table.edition, serving.submitter.forms)
            record = known.record(serving.submitter.next_id(), chunk, monotonic_ns())
            if self._trace is None:
                self.record, self.form = record, known.form
                serving.submitter.send(self)
            else:
                # What is to be noted of it is said in the record, which is its own then.
                self._known = None
                self._trace.stamp("HTTP_RECV_END")
                assert known.form is not None
                whole = whole_request(known.form.template, record)
                self._submit_whole(msgspec.structs.replace(whole, trace=self._trace.level))
        except ServingError as error:
            self._answer_error(http_status(error), error.message)
        except Exception:
            self._answer_defect()

    def expect(self, known: KnownLargeRequest) -> PlacedBody | None:
        """Instead of ``begin``: it is probably the known one, whose body goes there. None: it cannot be taken so, not now."""
        serving = self._serving
        tracer = serving.tracer
        try:
            lease = serving.submitter.loan(known.lease_size)
            if lease is None:
                return None
            self._leases = (lease,)
            if known.edition != serving.table.edition or (tracer is not None and tracer.on):
                self._admit()
                known.admitted(serving.table.edition, serving.submitter.forms)
            self.placed = body = known.body(lease)
        except ServingError:
            self._give_back()
            return None
        except Exception:
            _log.exception("a large request for model '%s' goes the ordinary way", self._head.model)
            self._give_back()
            return None
        return body

    def repeat_large(self, known: KnownLargeRequest) -> bool:
        """Instead of ``complete`` and ``take_turn``. False: it was another one, and goes the ordinary way from here on."""
        body, self.placed = self.placed, None
        assert body is not None
        if self._trace is None:
            submitter = self._serving.submitter
            record = known.record(submitter.next_id(), body.lease, monotonic_ns())
            if record is not None:
                self.record, self.form, self.leases = record, known.form, self._leases
                self.phase, self._leases = Phase.SUBMITTED, ()
                try:
                    submitter.send(self)
                except ServingError as error:
                    self._answer_error(http_status(error), error.message)
                except Exception:
                    self._answer_defect()
                return True
        self._known, self._leases, self._my_turn = None, (), True
        self._reception = Reception(self._serving, self._head, self._outlet.pause_body, self._go_on)
        self._reception.hold(body)
        self.complete()
        return False

    # ------------------------------------------------------------------------------------------------ submit

    def _go_on(self) -> None:
        """Submits once the body is whole and placed and it is our turn."""
        if (
            self._gone
            or self._job is not None
            or not (self._my_turn and self.phase is Phase.RECEIVED and self.reception.ready)
        ):
            return
        try:
            if self.reception.error is not None:
                raise self.reception.error
            self._read()
        except BodyTooLarge as error:
            self._answer_error(413, error.message)
        except ServingError as error:
            self._answer_error(http_status(error), error.message)
        except Exception:
            self._answer_defect()

    def _read(self) -> None:
        """Decodes the JSON and submits. What is large in it is found first, in steps."""
        json_size, body = self._head.json_size, self.reception.body
        if isinstance(body, PlacedBody):
            assert json_size is not None
            size = body.received
            content: bytes | memoryview = body.head(json_size or size)
        else:
            content = body.whole()
            size = len(content)
            if json_size is not None and json_size > size:
                raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {json_size}")
        if json_size == 0:
            self._submit(decode_raw(self._serving.table.find(self._head.model, self._head.version), content))
            return
        text = content if json_size is None else content[:json_size]
        if len(text) <= PIECE_BYTE_SIZE:
            apart = json_cut.cut(text) if len(text) > request_codec.MAX_UNCUT else None
            self._decode(text, size - len(text), apart)
            return

        def cut(apart: json_cut.Cut | None) -> None:
            self._job = None
            self._answer_if_refused(self._decode, text, size - len(text), apart)

        self._job = self._serving.conversions.run(json_cut.steps(text), cut, self._not_converted)

    def _decode(self, text: bytes | memoryview, tail_size: int, apart: json_cut.Cut | None) -> None:
        self._submit(self._serving.recognised.decode(text, tail_size, self._head.model, apart))

    def _submit(self, decoded: DecodedRequest) -> None:
        if self._serving.options.requests.make_ids and not decoded.id:
            # What was decoded may be shared.
            decoded = dataclasses.replace(decoded, id=request_id.made(), id_is_made=True)
        self.decoded = decoded
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

        self._serving.submitter.wait_for_room(size, granted, self._head.model)

    def _place_granted(self, decoded: DecodedRequest, lease: Lease | ServingError) -> None:
        if isinstance(lease, ServingError):
            raise lease
        self._place(decoded, lease)

    def _place(self, decoded: DecodedRequest, lease: Lease | None) -> None:
        if lease is not None:
            self._leases = (lease,)
        inline, json_size = self._serving.submitter.inline_byte_size, self._head.json_size or 0
        tensors = placement.place(decoded, self.reception.body, json_size, lease, inline)
        if lease is None or placement.is_filled(decoded):
            self._send(decoded, tensors)
            return

        def filled(tensors: tuple[Tensor, ...]) -> None:
            self._job = None
            self._answer_if_refused(self._send, decoded, tensors)

        self._job = self._serving.conversions.run(placement.fill(decoded, tensors, lease), filled, self._not_converted)

    def _send(self, decoded: DecodedRequest, inputs: tuple[Tensor, ...]) -> None:
        reception, self._reception = self._reception, None
        if reception is not None:
            reception.drop_body()
            self._leases = (*reception.take_leases(), *self._leases)
        level = 0 if self._trace is None else self._trace.level
        number = self._serving.submitter.next_id()
        self._submit_whole(decoded.record(number, self._head, inputs, monotonic_ns(), level))
        self.phase = Phase.SUBMITTED

    def _submit_whole(self, record: Submit) -> None:
        if self._trace is not None:
            self._trace.client_id = record.client_id
            self._trace.stamp("REQUEST_START")
        self.record, self.leases, self._leases = record, self._leases, ()
        self._serving.submitter.send(self)

    # ------------------------------------------------------------------------------------------------ the end

    def abandon(self) -> None:
        """The client is gone."""
        self._gone = True
        if self._job is not None:
            self._job.cancel()
            self._job = None
        self._serving.submitter.cancel(self.record.request_id)
        self._give_back()
        if self._deflation is not None:
            self._deflation.drop()
        self.written()

    def _give_back(self) -> None:
        reception, self._reception = self._reception, None
        if reception is not None:
            reception.drop()
        leases, self._leases = self._leases, ()
        for lease in leases:
            self._serving.submitter.give_back(lease)
