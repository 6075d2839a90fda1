"""Messages into requests, by what was learned from earlier ones.

A client that asks again and again sends the same message but for its ``id`` and its raw tensors' bytes. Two things are kept:

    head        what the bytes beside id and raw tensors mean, which costs protobuf and checks to find out
    layout      of a whole message, by its size: which bytes these are, so that a few comparisons stand for reading its fields

The same bytes mean the same. Whether the model is there is asked each time.
"""

from __future__ import annotations

from collections.abc import Sequence

from daemon.grpc.reception import Reception
from daemon.grpc.request_codec import DecodedHead, decode_head
from daemon.grpc.request_fields import Buffer, RefusedRequest, split
from daemon.inference import Content, InferenceRequest, form_of
from daemon.model_table import ModelTable
from daemon.submit import Submitter
from shm.errors import InvalidArgument, ServingError
from shm.forms import Form
from shm.messages import ModelState, RegionSlice, Submit

_Place = tuple[int, int]


class _Layout:
    """Messages of one size that differ in their id and in their raw tensors' bytes alone."""

    __slots__ = ("_contents", "_form", "_id", "_inputs", "_submitter", "decoded", "fixed")

    def __init__(
        self,
        message: bytes,
        client_id: _Place,
        raws: list[_Place],
        decoded: DecodedHead,
        submitter: Submitter | None,
    ) -> None:
        self.decoded = decoded
        #: The form of such messages is asked for when the second one comes.
        self._submitter = submitter
        self._form: Form[Submit] | None = None
        self._id = slice(*client_id)
        places = iter(raws)
        #: Name, datatype, shape, and the content or where in the message it is.
        self._inputs: list[tuple[str, str, tuple[int, ...], Content | slice]] = [
            (name, datatype, shape, slice(*next(places)) if content is None else content)
            for name, datatype, shape, content in decoded.inputs
        ]
        #: Of a form: what it leaves open, in its order.
        self._contents = [where for _, _, _, where in self._inputs if not isinstance(where, RegionSlice)]
        #: What does not differ.
        self.fixed: list[tuple[slice, bytes]] = []
        at = 0
        for begin, end in sorted((client_id, *raws)):
            if at < begin:
                self.fixed.append((slice(at, begin), message[at:begin]))
            at = end
        if at < len(message):
            self.fixed.append((slice(at, len(message)), message[at:]))

    def request(self, message: Buffer) -> InferenceRequest:
        """A message of this layout. Raises RefusedRequest: its id is no text."""
        client_id = _text(bytes(message[self._id]))
        if self._form is not None:
            request = _request(self.decoded, client_id, [])
            request.form = self._form
            request.contents = tuple(
                [bytes(message[where] if type(where) is slice else where) for where in self._contents]  # type: ignore[arg-type]
            )
            return request
        inputs: list[tuple[str, str, tuple[int, ...], Content]] = [
            (name, datatype, shape, message[where] if type(where) is slice else where)
            for name, datatype, shape, where in self._inputs
        ]
        request = _request(self.decoded, client_id, inputs)
        if self._submitter is not None:
            self._form, self._submitter = form_of(self._submitter, request), None
        return request


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
        self._decoded: dict[tuple[bytes, bool], DecodedHead] = {}
        self._layouts: dict[int, _Layout] = {}

    def decode(self, message: Buffer) -> tuple[DecodedHead, InferenceRequest, ModelState]:
        """A message as a request, and what its model is. Raises RefusedRequest."""
        layout = self._layouts.get(len(message))
        if layout is not None:
            for where, content in layout.fixed:
                if message[where] != content:
                    break
            else:
                request, decoded = layout.request(message), layout.decoded
                try:
                    return decoded, request, self._table.find(decoded.model, decoded.version)
                except ServingError as error:
                    raise RefusedRequest(error, request.id) from None
        head, client_id, id_at, raws = split(message)
        decoded = self._head(head, client_id, bool(raws))
        understood = self._understood(decoded, client_id, [message[begin:end] for begin, end in raws])
        if len(head) <= self.MAX_HEAD and len(message) <= self.MAX_MESSAGE and raws:
            if len(self._layouts) >= self.MAX_COUNT:
                self._layouts.clear()
            self._layouts[len(message)] = _Layout(bytes(message), id_at, raws, decoded, self._submitter)
        return understood

    def decode_received(self, message: Reception) -> tuple[DecodedHead, InferenceRequest, ModelState]:
        """The same of one that was placed while it arrived. Its lease is the request's, or given back. Raises RefusedRequest."""
        try:
            head, client_id, raws = message.fields()
            understood = self._understood(self._head(head, client_id, True), client_id, raws)
        except RefusedRequest:
            message.drop()
            raise
        understood[1].lease = message.take_lease()
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
