"""Caches decoded request messages. What the messages of one kind have in common is decoded only in the first of them.

Messages are of one kind if they differ only in id, scheduling parameters and raw tensors:

    message  | model, parameters, inputs, outputs | id | scheduling parameters | raw tensors |
               decoded once for each kind           decoded in each message

Messages of one kind may come over any connection. The front sends the first request of a kind to a worker in full. Later
requests of that kind can be sent prepared. A message is not cached, and so always decoded in full, if ``walk`` cannot split it,
if it is no valid request, or if it has tensor values outside ``raw_input_contents``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from tensord.daemon.front.bounded_cache import BoundedCache
from tensord.daemon.grpc.request_codec import DecodedHead, decode_head, decode_scheduling, model_of
from tensord.daemon.grpc.request_fields import RefusedRequest, split
from tensord.daemon.grpc.response_codec import AnswerLayout
from tensord.daemon.grpc.walk import Walked
from tensord.daemon.submit.model_states import ModelStates
from tensord.daemon.submit.placement import InputContent
from tensord.daemon.submit.submitter import Submitter
from tensord.shm.common.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.control_records import ModelState
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import Buffer, PreparedAnswer, PreparedRequest
from tensord.shm.prepared import MAX_NUMBERS, Numbered


class Understood(NamedTuple):
    """A fully decoded gRPC inference request, and the front's description of the requested model version."""

    head: DecodedHead
    client_id: str
    scheduling: Scheduling
    #: The raw tensors.
    contents: Sequence[InputContent]
    state: ModelState
    #: Its entry in the cache, if it is the first of its kind: it can be sent as the next ones are. None: it is not the first, is
    #: not cached, has parameters that schedule or needs arena memory.
    learned: PreparedMessage | None


@dataclass(slots=True, eq=False)
class PreparedMessage:
    """The decoded part that requests share if they differ only in id, scheduling parameters and raw tensors."""

    #: Kinds of answers remembered: of each worker another one, and where outputs have no fixed shape more.
    MAX_ANSWERS: ClassVar[int] = 8

    decoded: DecodedHead
    #: True if the model is decoupled: it may send several responses to one request.
    decoupled: bool = False
    #: The edition of the table of models in which ``decoupled`` was looked up.
    edition: int = -1
    #: The constant part of its requests, with a number on each lane, from the second request on; None: only one has come yet.
    numbered: Numbered[PreparedRequest] | None = None
    #: How answers are written, by what they have in common: for streams, and for unary calls.
    streamed: dict[int, AnswerLayout] = field(default_factory=dict)
    unary: dict[int, AnswerLayout] = field(default_factory=dict)

    def answer_layout(self, prepared: PreparedAnswer, streamed: bool) -> AnswerLayout:
        """Returns the object that encodes answers whose repeated part is ``prepared``.

        ``streamed``: whether the answers are for ModelStreamInfer, and not for ModelInfer.
        """
        known = self.streamed if streamed else self.unary
        # Who is kept here keeps what was prepared, so nothing else has its address meanwhile.
        layout = known.get(id(prepared))
        if layout is None:
            if len(known) >= self.MAX_ANSWERS:
                known.clear()
            layout = AnswerLayout(prepared, self.decoded.model, prepared.final if streamed else None)
            known[id(prepared)] = layout
        return layout

    def __repr__(self) -> str:
        return f"<PreparedMessage of model '{self.decoded.model}'>"


class PreparedMessages(BoundedCache[bytes, PreparedMessage]):
    """Caches decoded request messages. The key is a message's bytes without id, scheduling parameters and raw tensors."""

    __slots__ = ("_schedulings", "_submitter", "_table")

    def __init__(self, table: ModelStates, submitter: Submitter, count: int = MAX_NUMBERS) -> None:
        """Makes an empty cache for at least the ``count`` messages used last. If ``count`` is 0, nothing is cached."""
        super().__init__(count)
        self._table = table
        self._submitter = submitter
        #: Scheduling parameters that were read before, by their bytes.
        self._schedulings: BoundedCache[bytes, Scheduling] = BoundedCache(count)

    def is_usable(self, known: PreparedMessage, raws: int) -> bool:
        """Returns whether the cached message ``known`` can be used to read a new message with ``raws`` raw tensors.

        Returns False if ``known`` has another number of raw tensors, or if the model of ``known`` cannot be served now.
        """
        return known.decoded.raw_count == raws and (known.edition == self._table.edition or self._serves(known))

    def scheduling(self, parameters: bytes) -> Scheduling | None:
        """Decodes a message's scheduling parameters, such as the priority.

        Returns None if any of ``parameters`` is invalid or is no scheduling parameter.
        """
        if not parameters:
            return UNSCHEDULED
        found = self._schedulings[parameters]
        if found is None:
            found = decode_scheduling(parameters)
            if found is not None:
                self._schedulings.put(parameters, found)
        return found

    def _serves(self, known: PreparedMessage) -> bool:
        decoded = known.decoded
        try:
            known.decoupled = self._table.find(decoded.model, decoded.version).streams
        except ServingError:
            return False
        if known.numbered is None:
            known.numbered = self._submitter.numbers.number(decoded.prepared)
        known.edition = self._table.edition
        return True

    # ---------------------------------------------------------------------------------------------------- read exactly

    def read(
        self, content: Buffer, start: int, end: int, walked: Walked | None, known: PreparedMessage | None
    ) -> Understood:
        """Decodes the message ``content[start:end]`` in full. May cache the decoded message if ``known`` is None.

        ``walked``: the parts of the message as ``walk`` returned them. If it is None, the message is not cached.
        ``known``: a cached message that differs from this message only in id, raw tensors and scheduling parameters, or None.
        Raises RefusedRequest if the message is no valid request for a served model.
        """
        if walked is None or walked[2]:
            message = content[start:end]
            head, client_id, places = split(message)
            return self.understand(head, client_id, [message[begin:stop] for begin, stop in places], walked, known)
        rest, client_id, _, raws, _ = walked
        if end - start < len(content):
            # Views would keep everything that came with the message.
            raws = tuple(map(bytes, raws))  # type: ignore[arg-type]
        return self.understand(rest, client_id, raws, walked, known)

    def understand(
        self,
        head: bytes,
        client_id: bytes,
        raws: Sequence[InputContent],
        walked: Walked | None,
        known: PreparedMessage | None,
    ) -> Understood:
        """Decodes a request message as ``read`` does, from its parts.

        ``head``: the message without the id and ``raw_input_contents``. ``raws``: the entries of ``raw_input_contents``.
        """
        try:
            text = client_id.decode()
        except UnicodeDecodeError:
            raise RefusedRequest(InvalidArgument("the request id is not UTF-8 text")) from None
        decoded = scheduling = None
        if known is not None and known.decoded.raw_count == len(raws):
            # Its model does not serve, or it is traced, or given to others with headers.
            decoded, scheduling = known.decoded, self.scheduling(walked[2])  # type: ignore[index]
        try:
            if decoded is None or scheduling is None:
                decoded, state = decode_head(head, bool(raws), self._table)
                scheduling = decoded.scheduling
            else:
                state = self._table.expect(decoded.model, decoded.version)
            if len(raws) != decoded.raw_count:
                raise decoded.miscounted(len(raws))
        except ServingError as error:
            raise RefusedRequest(error, text, model=model_of(head)) from None
        learned = None
        if known is None and walked is not None and state.metadata:
            rest, _, parameters, _, room = walked
            shared = self._decode_rest(rest, bool(raws)) if parameters else decoded
            # Parameters that schedule are in the rest only where clients do not write them like that. Whatever they say, one in
            # front of them that is no part of the rest may say otherwise, and protobuf takes the last.
            if shared is not None and shared.is_raw and not shared.schedules:
                learned = PreparedMessage(shared, state.streams)
                self.put(rest, learned)
                if parameters or room:
                    learned = None
        return Understood(decoded, text, scheduling, raws, state, learned)

    def _decode_rest(self, rest: bytes, has_raw: bool) -> DecodedHead | None:
        try:
            return decode_head(rest, has_raw, self._table)[0]
        except ServingError:
            return None  # what comes twice, in two spellings, may be right only together
