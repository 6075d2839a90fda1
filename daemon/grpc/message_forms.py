"""The forms of messages that came: what they mean that differ in their id, scheduling and raw tensors alone, by the rest's bytes.

A message's rest (``walk``) is read once, by protobuf. Whoever sends the same rest again, on any connection, with whatever id and
tensors, asks for the same, and that request is one of that kind. What the rest means never changes; whether its model is there is
asked again whenever any model has changed.
"""

from __future__ import annotations

from tensord.daemon.front.memo import Memo
from tensord.daemon.grpc.answer_form import AnswerForm
from tensord.daemon.grpc.request_codec import DecodedHead, decode_scheduling
from tensord.daemon.submit.inference import numbered
from tensord.daemon.submit.model_table import ModelTable
from tensord.daemon.submit.scheduling import UNSCHEDULED, Scheduling
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.errors import NotFound
from tensord.shm.messages import PreparedAnswer, PreparedRequest
from tensord.shm.prepared import MAX_NUMBERS, Numbered


class MessageForm:
    """Owned by ``MessageForms``."""

    __slots__ = ("decoded", "decoupled", "edition", "numbered", "streamed", "unary")

    #: Kinds of answers remembered: of each worker another one, and where outputs have no fixed shape more.
    MAX_ANSWERS = 8

    def __init__(self, decoded: DecodedHead) -> None:
        self.decoded = decoded
        #: What its requests have in common on a lane; there once a second one came, so what comes once takes nobody's number.
        self.numbered: Numbered[PreparedRequest] | None = None
        #: Whether its model is decoupled, in that edition of the table.
        self.decoupled = False
        self.edition = -1
        #: How answers are written, by what they have in common: for streams, and for unary calls.
        self.streamed: dict[int, AnswerForm] = {}
        self.unary: dict[int, AnswerForm] = {}

    def answer_form(self, prepared: PreparedAnswer, streamed: bool) -> AnswerForm:
        """How answers with that in common are written."""
        known = self.streamed if streamed else self.unary
        # Who is kept here keeps what was prepared, so nothing else has its address meanwhile.
        form = known.get(id(prepared))
        if form is None:
            if len(known) >= self.MAX_ANSWERS:
                known.clear()
            form = known[id(prepared)] = AnswerForm(prepared, self.decoded.model, prepared.final if streamed else None)
        return form

    def __repr__(self) -> str:
        return f"<MessageForm of model '{self.decoded.model}'>"


class MessageForms:
    """Those of a front. Of all that came, the last ones and those that came again since."""

    def __init__(self, table: ModelTable, submitter: Submitter, count: int = MAX_NUMBERS) -> None:
        """``count``: so many are remembered at least; 0: none."""
        self._table = table
        self._submitter = submitter
        #: By their rest.
        self._forms: Memo[bytes, MessageForm] = Memo(count)
        #: What parameters say that schedule, by their bytes.
        self._schedulings: Memo[bytes, Scheduling] = Memo(count)

    def find(self, rest: bytes, raws: int) -> MessageForm | None:
        """The form of messages with that rest and so many raw tensors, and of a model that serves. None: read it."""
        form = self._forms[rest]
        if form is None or (form.edition != self._table.edition and not self._serves(form)):
            return None
        return form if form.decoded.raw_count == raws else None

    def decoded(self, rest: bytes, raws: int) -> DecodedHead | None:
        """What the rest of such messages says."""
        form = self._forms[rest]
        return None if form is None or form.decoded.raw_count != raws else form.decoded

    def scheduling(self, parameters: bytes) -> Scheduling | None:
        """What parameters say that a message had of its own. None: read the message."""
        if not parameters:
            return UNSCHEDULED
        found = self._schedulings[parameters]
        if found is None:
            found = decode_scheduling(parameters)
            if found is not None:
                self._schedulings.put(parameters, found)
        return found

    def learn(self, rest: bytes, decoded: DecodedHead) -> None:
        """A message with that rest became a request."""
        # Parameters that schedule are in the rest only where clients do not write them like that. Whatever they say, one in
        # front of them that is no part of the rest may say otherwise, and protobuf takes the last.
        if decoded.is_raw and not decoded.schedules and self._forms[rest] is None:
            self._forms.put(rest, MessageForm(decoded))

    def _serves(self, form: MessageForm) -> bool:
        """The table has changed: whether the model is still there, and as what."""
        decoded = form.decoded
        try:
            form.decoupled = self._table.find(decoded.model, decoded.version).streams
        except NotFound:
            return False
        if form.numbered is None:
            form.numbered = numbered(self._submitter, decoded.request("", [b""] * decoded.raw_count, UNSCHEDULED))
        form.edition = self._table.edition
        return True

    def __repr__(self) -> str:
        return f"<MessageForms {self._forms!r}>"
