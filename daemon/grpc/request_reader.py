"""Messages read exactly: by their fields, protobuf and checks, which word what is wrong. What is found is learned as a form.

    message ─▶ | id | raw tensors | head ─▶ what it says ─▶ request
                                     ╰─▶ | scheduling | rest ─▶ form

This is the way of the first message of a form, of what is malformed or unusual, and of what carries its values beside its raw
tensors. All others are walked over, and are of a form (``message_forms``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tensord.daemon.grpc.message_forms import MessageForms
from tensord.daemon.grpc.reception import Reception
from tensord.daemon.grpc.request_codec import DecodedHead, decode_head
from tensord.daemon.grpc.request_fields import RefusedRequest, split
from tensord.daemon.grpc.walk import walk
from tensord.daemon.submit.inference import Content, InferenceRequest
from tensord.daemon.submit.model_table import ModelTable
from tensord.shm.control_records import ModelState
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import Buffer

#: What a request's head says, the request, and what its model is.
Understood = tuple[DecodedHead, InferenceRequest, ModelState]


class RequestReader:
    """Owned by its front."""

    def __init__(self, table: ModelTable, forms: MessageForms) -> None:
        self._table = table
        self._forms = forms

    def read(self, message: Buffer) -> Understood:
        """A whole message. Raises RefusedRequest."""
        head, client_id, raws = split(message)
        return self._understood(head, client_id, [message[begin:end] for begin, end in raws])

    def read_received(self, message: Reception) -> Understood:
        """One that was placed while it arrived. Its lease is the request's, or given back. Raises RefusedRequest."""
        try:
            understood = self._understood(*message.fields())
        except BaseException:
            message.drop()
            raise
        understood[1].lease = message.take_lease()
        return understood

    def _understood(self, head: bytes, client_id: bytes, raws: Sequence[Content]) -> Understood:
        try:
            text = client_id.decode()
        except UnicodeDecodeError:
            raise RefusedRequest(InvalidArgument("the request id is not UTF-8 text")) from None
        forms, parted = self._forms, walk(head, 0, len(head), 0)
        rest, parameters = (head, b"") if parted is None else (parted[0], parted[2])
        decoded = None if parted is None else forms.decoded(rest, len(raws))
        scheduling = None if decoded is None else forms.scheduling(parameters)
        try:
            if decoded is None or scheduling is None:
                decoded = decode_head(head, bool(raws), self._table)
                scheduling = decoded.scheduling
            state = self._table.expect(decoded.model, decoded.version)
            request = decoded.request(text, raws, scheduling)
        except ServingError as error:
            raise RefusedRequest(error, text) from None
        if parted is not None and state.metadata:
            with contextlib.suppress(ServingError):  # what comes twice, in two spellings, may be right only together
                forms.learn(rest, decode_head(rest, bool(raws), self._table) if parameters else decoded)
        return decoded, request, state
