"""One inference request, on the short way past ASGI: no task, no queue, no event. This is its incoming half.

    head ─▶ body (reception) ─▶ form (http_forms) ─▶ submit ─▶ answer ─▶ encode (answering) ─▶ socket
     ╰────── small and whole ────▲

Each arrow is a call from the connection's or the lane's callback. The connection (answer_order) keeps exchanges in the order in
which their requests came, so an answer is written only by the exchange whose turn it is.
"""

from __future__ import annotations

import logging
import uuid
from time import monotonic_ns

import msgspec

from tensord.daemon.front.status import http_status
from tensord.daemon.http import json_cut, placement, request_codec
from tensord.daemon.http.answering import DECOUPLED, Answering, Phase
from tensord.daemon.http.body import Body, CollectedBody, PlacedBody
from tensord.daemon.http.http_form import Request
from tensord.daemon.http.http_forms import request_of
from tensord.daemon.http.json_array import PIECE_BYTE_SIZE
from tensord.daemon.http.raw_request import decode_raw
from tensord.daemon.http.reception import Reception
from tensord.daemon.submit.scheduling import UNSCHEDULED
from tensord.shm import trace_stamps
from tensord.shm.arena import Lease
from tensord.shm.errors import InvalidArgument, ServingError, Unavailable, Unsupported
from tensord.shm.messages import Content, PreparedRequest, RequestRecord
from tensord.shm.prepared import Numbered

_log = logging.getLogger(__name__)
# A member of an enum is found slowly.
_RECEIVING, _RECEIVED, _SUBMITTED = Phase.RECEIVING, Phase.RECEIVED, Phase.SUBMITTED


class Exchange(Answering):
    """One inference request and its answer."""

    #: From ``begin`` until the submitter has the tensors: each refers to the other, and requests shall leave the garbage
    #: collector nothing to do.
    _reception: Reception | None = None
    _my_turn: bool = False
    #: Until it is sent: where tensors lie that did not come in the body's own leases.
    _leases: tuple[Lease, ...] = ()

    # -------------------------------------------------------------------------------------------------- body

    def begin(self) -> None:
        """The head is complete: prepare a place for the body."""
        reception = self._reception = Reception(
            self._serving, self._head, self._outlet.pause_body, self._go_on, self._outlet.account
        )
        try:
            if self._head.error is not None:
                raise self._head.error
            self._admit()
            reception.begin()
        except ServingError as error:
            reception.error = error

    def _admit(self) -> None:
        """Raises NotFound, Unsupported: there is no such model for HTTP."""
        head, table = self._head, self._serving.table
        if head.edition != table.edition:
            # Of one that is being loaded it is not known yet: see ``Answering.completed``.
            if table.expect(head.model, head.version).streams:
                raise Unsupported(DECOUPLED)
            head.edition = table.edition
        tracer = self._serving.tracer
        if tracer is not None and tracer.on:
            self._trace = tracer.sample(self._head.model)
            if self._trace is not None:
                self._trace.stamp(trace_stamps.HTTP_RECV_START)

    @property
    def reception(self) -> Reception:
        """The body that is arriving."""
        assert self._reception is not None
        return self._reception

    @property
    def body(self) -> Body:
        """What came of the body, and where it lies."""
        return self.reception.body

    @property
    def received(self) -> int:
        """Bytes of the body that came."""
        return self.reception.received

    @property
    def refused(self) -> bool:
        """Whether the answer is an error already, so that the rest of the body need not come."""
        return self.reception.error is not None

    def complete(self) -> None:
        """The body is whole."""
        if self.phase is not _RECEIVING:
            return
        if self._trace is not None:
            self._trace.stamp(trace_stamps.HTTP_RECV_END)
        self.phase = _RECEIVED
        self.reception.complete()
        self._go_on()

    def take_turn(self) -> None:
        """Every earlier exchange of this connection is answered."""
        self._my_turn = True
        self._go_on()

    def take(self, data: bytes, begins: int) -> None:
        """Instead of all these: the body is whole, small and not compressed, and it is this exchange's turn.

        Args:
          data: what came; the body is all of it from ``begins`` on.
        """
        serving, head = self._serving, self._head
        tracer = serving.tracer
        try:
            if head.edition != serving.table.edition or (tracer is not None and tracer.on):
                self._admit()
                if self._trace is not None:
                    self._trace.stamp(trace_stamps.HTTP_RECV_END)
            ends = begins + head.text_size
            text = data[begins:ends]
            forms = serving.forms
            if head.key is None:
                request = forms.read(head, text, head.tail_size)
            else:
                key = head.key, text
                request = forms.texts[key] or forms.meet(head, key)
            form, client_id, scheduling = request.form, request.id, request.scheduling
            if form.unpack is None or self._trace is not None:
                self._submit(request, CollectedBody.of(data[begins:]))
                return
            if not client_id and serving.makes_ids:
                client_id = str(uuid.uuid4())
            self._asked, self._client_id = form, client_id
            numbered: Numbered[PreparedRequest] = form.numbered  # type: ignore[assignment]
            self.numbered = numbered
            submitter, number, contents = serving.submitter, numbered.number, form.unpack(data, ends)
            # Most say nothing of their scheduling, and to unpack that costs more than all else here.
            self.record = (
                RequestRecord(submitter.next_id(), number, contents, client_id, 0, monotonic_ns())
                if scheduling is UNSCHEDULED
                else RequestRecord(submitter.next_id(), number, contents, client_id, 0, monotonic_ns(), *scheduling)
            )
            submitter.send(self)
        except ServingError as error:
            self._answer_error(http_status(error), error.message)
        except Exception:
            self._answer_defect()

    def begin_now(self) -> PlacedBody | None:
        """As ``begin``, of a large binary body whose turn it is. None: nothing happened; it has no place now, or is refused."""
        reception = Reception(self._serving, self._head, self._outlet.pause_body, self._go_on, self._outlet.account)
        try:
            body = reception.begin_now()
            if body is None:
                return None
            self._admit()
        except ServingError:
            reception.drop()
            return None
        except Exception:
            _log.exception("a large request for model '%s' goes the ordinary way", self._head.model)
            reception.drop()
            return None
        self._reception = reception
        self._my_turn = True
        return body

    # ------------------------------------------------------------------------------------------------ submit

    def _go_on(self) -> None:
        """Submits once the body is whole and placed and it is our turn."""
        if self.phase is not _RECEIVED or not self._my_turn or self._gone or self._job is not None:
            return
        reception = self.reception
        if not reception.ready:
            return
        try:
            if reception.error is not None:
                raise reception.error
            self._read(reception.body)
        except ServingError as error:
            self._answer_error(http_status(error), error.message)
        except Exception:
            self._answer_defect()

    def _read(self, body: Body) -> None:
        """Decodes the JSON and submits. What is large in it is found first, in steps."""
        json_size = self._head.json_size
        text: bytes | memoryview
        if isinstance(body, PlacedBody):
            size = body.received
            text = body.head(json_size or size)
        else:
            text = body.whole()
            size = len(text)
            if json_size is not None:
                if json_size > size:
                    raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {json_size}")
                text = text[: json_size or size]
        if json_size == 0:
            state = self._serving.table.expect(self._head.model, self._head.version)
            if not state.metadata:
                raise Unavailable(f"model '{state.name}' is being loaded, and what its raw input is is not known yet")
            raw = decode_raw(state, text)
            self._submit(request_of(self._head, raw), body)
            return
        if len(text) <= PIECE_BYTE_SIZE:
            apart = json_cut.cut(text) if len(text) > request_codec.MAX_UNCUT else None
            self._decode(text, apart, body, size)
            return

        def cut(apart: json_cut.Cut | None) -> None:
            self._job = None
            self._answer_if_refused(self._decode, text, apart, body, size)

        self._job = self._serving.conversions.run(json_cut.steps(text), cut, self._not_converted)

    def _decode(self, text: bytes | memoryview, apart: json_cut.Cut | None, body: Body, size: int) -> None:
        request = self._serving.forms.read(self._head, text, size - len(text), apart)
        form = request.form
        if form.placed is None or type(body) is not PlacedBody or self._serving.makes_ids:
            self._submit(request, body)
            return
        self._asked, self._client_id = form, request.id
        self._send(request, body.places(len(text), form.placed))

    def _submit(self, request: Request, body: Body) -> None:
        if self._serving.makes_ids and not request.id:
            request = msgspec.structs.replace(request, id=str(uuid.uuid4()))
        self._asked, self._client_id = request.form, request.id
        size = placement.room(request.sources, body, self._serving.submitter.inline_byte_size)
        if size == 0:
            self._place(request, body, None)
            return
        lease = self._serving.submitter.loan(size, self._outlet.account)
        if lease is not None:
            self._place(request, body, lease)
            return

        def granted(lease: Lease | ServingError) -> None:
            if not isinstance(lease, ServingError) and self._gone:
                self._serving.submitter.give_back(lease)
            elif not self._gone:
                self._answer_if_refused(self._place_granted, request, body, lease)

        self._serving.submitter.wait_for_room(size, granted, self._head.model, self._outlet.account)

    def _place_granted(self, request: Request, body: Body, lease: Lease | ServingError) -> None:
        if isinstance(lease, ServingError):
            raise lease
        self._place(request, body, lease)

    def _place(self, request: Request, body: Body, lease: Lease | None) -> None:
        if lease is not None:
            self._leases = (lease,)
        inline, json_size = self._serving.submitter.inline_byte_size, self._head.json_size or 0
        contents = placement.place(request.sources, body, json_size, lease, inline)
        if lease is None or placement.is_filled(request.sources):
            self._send(request, tuple(contents))
            return

        def filled(contents: list[Content]) -> None:
            self._job = None
            self._answer_if_refused(self._send, request, tuple(contents))

        filling = placement.fill(request.sources, contents, lease)
        self._job = self._serving.conversions.run(filling, filled, self._not_converted)

    def _send(self, request: Request, contents: tuple[Content, ...]) -> None:
        reception, self._reception = self._reception, None
        leases = self._leases
        if leases:
            self._leases = ()
        if reception is not None:
            leases = reception.leave() + leases
        submitter, form, trace, noted = self._serving.submitter, request.form, self._trace, 0
        numbered = form.numbered or form.on_lane(submitter.numbers, submitter.inline_byte_size)
        if trace is not None:
            noted = trace.level
            trace.client_id = request.id
            trace.stamp(trace_stamps.REQUEST_START)
        prepared = form.prepared if numbered is None else numbered.number
        self.record = RequestRecord(
            submitter.next_id(), prepared, contents, request.id, 0, monotonic_ns(), *request.scheduling, noted
        )
        self.numbered, self.leases = numbered, leases
        submitter.send(self)
        self.phase = _SUBMITTED

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
