"""Messages into requests, by what was learned from earlier ones.

A client that asks again and again sends the same message but for its ``id`` and its raw tensors' bytes. Two things are kept:

    head        what the bytes beside id and raw tensors mean, which costs protobuf and checks to find out
    layout      of a whole message, by its size: which bytes these are, so that one comparison stands for reading its fields

A large message is placed while it arrives: its layout says where, before any of it is read (``PlacedMessage``). The same bytes
mean the same. Whether the model is there is asked whenever any has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from daemon.grpc.layout import LargeLayout, Layout, large_layout
from daemon.grpc.placed_message import PlacedMessage
from daemon.grpc.reception import Reception
from daemon.grpc.request_codec import DecodedHead, decode_head
from daemon.grpc.request_fields import Buffer, RefusedRequest, split
from daemon.inference import Content, InferenceRequest, form_of
from daemon.model_table import ModelTable
from daemon.submit import Submitter
from shm.control_records import ModelState
from shm.errors import InvalidArgument, NotFound, ServingError
from shm.messages import RegionSlice

#: A message as far as it is its own: the id as it came, and as text; the raw tensors.
Known = tuple[Layout, bytes, str, tuple[bytes, ...]]


class Recognised:
    """Owned by its front."""

    #: Longer heads hold data, or are rare; of longer messages reading the fields costs nothing beside the rest.
    MAX_HEAD = 2048
    MAX_MESSAGE = 64 << 10
    MAX_COUNT = 512

    def __init__(self, table: ModelTable, submitter: Submitter | None = None) -> None:
        """``submitter``: whose forms messages become; None: none, because something is still added to each request."""
        self._table = table
        self._submitter = submitter
        self._large: dict[int, LargeLayout] = {}
        self._decoded: dict[tuple[bytes, bool], DecodedHead] = {}
        self._layouts: dict[int, Layout] = {}

    def known(self, content: Buffer, start: int, end: int) -> Known | None:
        """A message, those bytes of ``content``, that becomes a request of a form. None: it is to be decoded."""
        layout = self._layouts.get(end - start)
        if layout is None or layout.form is None:
            return None
        pieces = layout.cut(content, start)
        if pieces[::2] != layout.fixed:
            return None
        if layout.edition != self._table.edition and not self._serves(layout):
            return None
        try:
            return layout, pieces[1], pieces[1].decode(), pieces[3::2]
        except UnicodeDecodeError:
            return None

    def placed(self, submitter: Submitter, byte_size: int, began: Buffer) -> PlacedMessage | None:
        """A large message of that size that begins so, in the submitter's arena. None: it is not known, or there is no room.

        Nothing is said of whether it becomes a request: see ``admits``.
        """
        layout = self._large.get(byte_size)
        if layout is None or len(began) < layout.head_size:
            return None
        pieces = layout.cut(began)
        if pieces[::2] != layout.fixed:
            return None
        try:
            text = pieces[1].decode()
            lease = submitter.loan(layout.lease_byte_size)
        except (ServingError, UnicodeDecodeError):
            # Whoever reads it says what is wrong.
            return None
        return None if lease is None else PlacedMessage(submitter, layout, pieces[1], text, lease)

    def admits(self, layout: Layout) -> bool:
        """Whether its messages become requests of its form."""
        return layout.form is not None and (layout.edition == self._table.edition or self._serves(layout))

    def _serves(self, layout: Layout) -> bool:
        """The table has changed: whether the model is still there, and as what."""
        try:
            layout.decoupled = self._table.find(layout.decoded.model, layout.decoded.version).decoupled
        except NotFound:
            return False
        layout.edition = self._table.edition
        return True

    def decode(self, message: Buffer) -> tuple[DecodedHead, InferenceRequest, ModelState]:
        """A message as a request, and what its model is. Raises RefusedRequest."""
        layout = self._layouts.get(len(message))
        if layout is not None and (own := layout.own(message)) is not None:
            understood = self._understood(layout.decoded, own[0], own[1:])
            if layout.awaits_form and self._submitter is not None:
                layout.form, layout.awaits_form = form_of(self._submitter, understood[1]), False
            return understood
        head, client_id, id_at, raws = split(message)
        decoded = self._head(head, client_id, bool(raws))
        understood = self._understood(decoded, client_id, [message[begin:end] for begin, end in raws])
        if (
            len(head) <= self.MAX_HEAD
            and len(message) <= self.MAX_MESSAGE
            and _is_raw(decoded)
            and (not raws or id_at[1] <= raws[0][0])
        ):
            if len(self._layouts) >= self.MAX_COUNT:
                self._layouts.clear()
            self._layouts[len(message)] = Layout(bytes(message), (id_at, *raws), decoded)
        return understood

    def decode_received(self, message: Reception | PlacedMessage) -> tuple[DecodedHead, InferenceRequest, ModelState]:
        """The same of one that was placed while it arrived. Its lease is the request's, or given back. Raises RefusedRequest."""
        try:
            understood = self._placed(message) if isinstance(message, PlacedMessage) else self._received(message)
        except BaseException:
            message.drop()
            raise
        understood[1].lease = message.take_lease()
        return understood

    def _placed(self, message: PlacedMessage) -> tuple[DecodedHead, InferenceRequest, ModelState]:
        layout = message.layout
        understood = self._understood(layout.decoded, message.client_id, message.contents())
        if layout.awaits_form and self._submitter is not None:
            layout.form, layout.awaits_form = form_of(self._submitter, understood[1]), False
        return understood

    def _received(self, message: Reception) -> tuple[DecodedHead, InferenceRequest, ModelState]:
        head, client_id, raws = message.fields()
        decoded = self._head(head, client_id, True)
        understood = self._understood(decoded, client_id, raws)
        lease = message.lease
        assert lease is not None
        if message.began and _is_raw(decoded):
            layout = large_layout(message.began, message.places, message.byte_size, lease, decoded)
            if layout is not None:
                if len(self._large) >= self.MAX_COUNT:
                    self._large.clear()
                self._large[message.byte_size] = layout
        return understood

    def _head(self, head: bytes, client_id: bytes, has_raw: bool) -> DecodedHead:
        key = (head, has_raw)
        decoded = self._decoded.get(key)
        if decoded is None:
            try:
                decoded = decode_head(head, has_raw, self._table)
            except ServingError as error:
                raise RefusedRequest(error, _text(client_id)) from None
            if len(head) <= self.MAX_HEAD:
                if len(self._decoded) >= self.MAX_COUNT:
                    self._decoded.clear()
                self._decoded[key] = decoded
        return decoded

    def _understood(
        self, decoded: DecodedHead, client_id: bytes, raws: Sequence[Content]
    ) -> tuple[DecodedHead, InferenceRequest, ModelState]:
        text = _text(client_id)
        try:
            state = self._table.find(decoded.model, decoded.version)
            return decoded, _request(decoded, text, _inputs(decoded, raws)), state
        except ServingError as error:
            raise RefusedRequest(error, text) from None


def _is_raw(decoded: DecodedHead) -> bool:
    """Whether all tensors are raw, or in regions."""
    return all(content is None or type(content) is RegionSlice for _, _, _, content in decoded.inputs)


def _text(client_id: bytes) -> str:
    try:
        return client_id.decode()
    except UnicodeDecodeError:
        raise RefusedRequest(InvalidArgument("the request id is not UTF-8 text")) from None


def _inputs(decoded: DecodedHead, raws: Sequence[Content]) -> list[tuple[str, str, tuple[int, ...], Content]]:
    """The raw tensors where they belong. Raises InvalidArgument: too many, or too few."""
    if len(raws) > decoded.raw_count:
        raise InvalidArgument(
            f"{len(raws)} raw_input_contents are given for model '{decoded.model}', its inputs take {decoded.raw_count}"
        )
    inputs: list[tuple[str, str, tuple[int, ...], Content]] = []
    number = 0
    for name, datatype, shape, content in decoded.inputs:
        if content is None:
            if number == len(raws):
                raise InvalidArgument(
                    f"unable to find data for input tensor '{name}' for model '{decoded.model}' in request."
                )
            content = raws[number]
            number += 1
        inputs.append((name, datatype, shape, content))
    return inputs


def _request(
    decoded: DecodedHead, client_id: str, inputs: list[tuple[str, str, tuple[int, ...], Content]]
) -> InferenceRequest:
    return InferenceRequest(
        decoded.model,
        decoded.version,
        inputs,
        decoded.outputs,
        decoded.parameters,
        client_id,
        decoded.priority,
        decoded.timeout_us,
        decoded.sequence_id,
        decoded.sequence_start,
        decoded.sequence_end,
    )
