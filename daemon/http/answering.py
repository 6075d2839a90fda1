"""The outgoing half of an exchange: from a worker's answer, or what went wrong, to the connection's pieces.

    AnswerRecord ─▶ with a number: but for its id the head is remembered ─▶ one piece
                 ├▶ encoded (response_codec), in steps where large       ─▶ pieces; slices of the arena as they lie
                 ╰▶ compressed, in steps                                 ─▶ one piece

``exchange`` is the incoming half.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Protocol

from tensord.daemon.front.status import http_status
from tensord.daemon.http import response_codec
from tensord.daemon.http.compression import Deflation
from tensord.daemon.http.conversions import Job
from tensord.daemon.http.http_form import HttpForm
from tensord.daemon.http.message_head import InferHead
from tensord.daemon.http.serving import Serving
from tensord.daemon.submit.accounts import Account
from tensord.daemon.submit.pending import Pending
from tensord.daemon.tracing.tracer import Trace
from tensord.shm import trace_stamps
from tensord.shm.errors import DEFECT, ServingError, Unsupported
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, PreparedAnswer, Slice

_log = logging.getLogger(__name__)
#: What who asks such a model here is told: Triton's words.
DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy; ask generate_stream, or a stream over gRPC"
#: Before which an answer's head says how the connection goes on.
_LENGTH = b"\r\nContent-Length: "


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


class Outlet(Protocol):
    """What an exchange needs of its connection."""

    account: Account

    def answer_whole(self, answer: bytes) -> None:
        """The active exchange's, where nothing has to be given back and the connection stays; then the next one may answer."""

    def answer_pieces(self, pieces: list[response_codec.Buffer]) -> bool:
        """The same of any. Returns whether they are all out; else ``written`` is called later."""

    def owes(self, exchange: Answering) -> bool:
        """Whether the answer that is written next is that exchange's."""

    def cut(self) -> None:
        """Cuts the connection off: its client cannot be answered."""

    def pause_body(self, pause: bool) -> None:
        """Stop (True) and go on (False) reading from the socket."""


class Answering(Pending):
    """Base of an exchange: what its answer needs."""

    _serving: Serving
    _head: InferHead
    _outlet: Outlet
    keep_alive: bool
    #: What the JSON said, once it is read.
    _asked: HttpForm | None = None
    phase: Phase = Phase.RECEIVING
    #: The client's, or one that was made here.
    _client_id: str = ""
    #: The client is.
    _gone: bool = False
    _job: Job | None = None
    #: The response lease whose bytes the transport still holds.
    _unwritten: tuple[SubmitterLane, tuple[int, int, int]] | None = None
    #: Of an answer that is being compressed.
    _deflation: Deflation | None = None
    #: Where the request is a sampled one.
    _trace: Trace | None = None

    @property
    def account(self) -> Account | None:
        return self._outlet.account

    def _give_back(self) -> None:
        """Whatever the request takes in memory."""
        raise NotImplementedError

    def completed(self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
        if type(own.prepared) is not int or not prepared.final or self._trace is not None or not self._head.is_plain:
            self._answer_anew(prepared, own, lane)
            return
        form: HttpForm = self._asked  # type: ignore[assignment]
        text, lease = form.last_answer, own.lease
        pieces: list[response_codec.Buffer] | None = None
        if lease is None:
            if text is None or text.prepared is not prepared:
                text = form.answer(prepared, own, lane.view)  # type: ignore[union-attr]
            answer = text.whole(self._client_id, own)
            if answer is not None:
                if self.keep_alive:
                    self._outlet.answer_whole(answer)
                    return
                pieces = [answer]
        else:
            assert lane is not None
            try:
                if text is None or text.prepared is not prepared:
                    text = form.answer(prepared, own, lane.view)
                pieces = text.pieces(self._client_id, own, lane.view)
            except Exception:
                pieces = None  # the ordinary way says what is wrong
            if pieces is not None:
                self._unwritten = lane, lease
        if pieces is None:
            self._answer_anew(prepared, own, lane)
            return
        if not self.keep_alive:
            pieces[0] = bytes(pieces[0]).replace(_LENGTH, b"\r\n" + response_codec.CLOSE + _LENGTH[2:], 1)
        self.phase = Phase.ANSWERED
        if self._outlet.answer_pieces(pieces):
            self.written()

    def _answer_anew(self, prepared: PreparedAnswer, own: AnswerRecord, lane: SubmitterLane | None) -> None:
        """Answers with nothing that is remembered."""
        if own.lease is not None and lane is not None:
            self._unwritten = (lane, own.lease)
        if self._trace is not None:
            self._trace.completed(prepared.version, own.trace)
        if own.code:
            self._answer_error(http_status(own.code), own.message)
            return
        if not prepared.final:
            # It came while its model was being loaded, and nobody knew that this one answers with several responses.
            self._serving.submitter.cancel(self.record.request_id)
            error = Unsupported(DECOUPLED)
            self._answer_error(http_status(error), error.message)
            return
        assert lane is not None
        assert self._asked is not None
        asked = self._asked.asked
        if own.lease is not None and response_codec.is_large(prepared, own.contents, asked.binary, asked.all_binary):
            steps = response_codec.encode_in_steps(
                prepared,
                own.contents,
                self._head.model,
                self._client_id,
                asked.binary,
                asked.all_binary,
                lane.view,
            )
            self._job = self._serving.conversions.run(steps, self._answer_converted, self._not_converted)
            return
        self._encode(prepared, own, lane.view)

    def _encode(self, prepared: PreparedAnswer, own: AnswerRecord, view: Callable[[Slice], memoryview]) -> None:
        assert self._asked is not None
        asked = self._asked.asked
        try:
            head, parts = response_codec.encode(
                prepared, own.contents, self._head.model, self._client_id, asked.binary, asked.all_binary, view
            )
        except ServingError as error:
            self._answer_error(http_status(error), error.message)
            return
        except Exception:
            self._answer_defect()
            return
        self._answer([head], parts)

    def undelivered(self) -> None:
        if self.phase is Phase.ANSWERED or self._gone or not self._outlet.owes(self):
            # Some of the answer may have left: nothing else can follow it.
            self._outlet.cut()
        else:
            self._answer_error(500, DEFECT)

    def _answer_converted(self, answer: tuple[list[response_codec.Buffer], list[response_codec.Buffer]]) -> None:
        self._job = None
        head, parts = answer
        if not parts:
            self.written()  # the tensors are text now, and the transport holds that
        self._answer_or_cut(self._answer, head, parts)

    def _answer_or_cut(self, step: Callable[..., None], *arguments: object) -> None:
        """The next step of an answer, where the caller is the loop."""
        try:
            step(*arguments)
        except Exception:
            self.fail_delivery()

    def _answer(self, head: list[response_codec.Buffer], parts: list[response_codec.Buffer]) -> None:
        json_size = len(head[0]) if len(head) == 1 else sum(map(len, head))
        if self._head.accepts:
            self._deflation = Deflation(self._head.accepts, self._serving.compression, (*head, *parts))
            self._deflate(self._deflation, json_size, bool(sum(map(len, parts))))
            return
        line = response_codec.response_head(json_size, sum(map(len, parts)), self._connection_line())
        self.phase = Phase.ANSWERED
        # Small pieces are cheaper joined; slices of the arena go to the socket as they lie.
        pieces: list[response_codec.Buffer] = [line, *head, *parts]
        if self._unwritten is None:
            pieces = [b"".join(pieces)]
        self._hand_over(pieces)

    def _hand_over(self, pieces: list[response_codec.Buffer]) -> None:
        """The answer goes to the connection, whole."""
        if self._trace is not None:
            self._trace.stamp(trace_stamps.HTTP_SEND_START)
        if self._outlet.answer_pieces(pieces):
            self.written()

    def _deflate(self, deflation: Deflation, json_size: int, binary: bool) -> None:
        """A step of it, and in the end the answer. The lease is given back then: the compressed bytes are our own."""
        if self._gone:
            return
        if deflation.step():
            asyncio.get_running_loop().call_soon(self._answer_or_cut, self._deflate, deflation, json_size, binary)
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
        lines = self._head.keep_alive_line if self.keep_alive else response_codec.CLOSE
        return self._head.origin_lines + lines

    def _answer_defect(self) -> None:
        """Ours or a worker's, and no reason to leave a client without its answer."""
        _log.exception("request '%s' for model '%s' met a defect of the server", self._client_id, self._head.model)
        self._answer_error(500, DEFECT)

    def written(self) -> None:
        """The transport holds nothing of the answer any more."""
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            self._serving.submitter.release(*unwritten)
        if self._trace is not None and self.phase is Phase.ANSWERED:
            self._trace.stamp(trace_stamps.HTTP_SEND_END)
            self._trace.end()
            self._trace = None

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
            _log.exception("a request for model '%s' met a defect of the server", self._head.model)
            self.undelivered()


def _raise(error: Exception) -> None:
    raise error
