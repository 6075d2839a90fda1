"""Messages read exactly: by their fields, protobuf and checks, which word what is wrong. What is found is learned as a form.

    message ─▶ | id | raw tensors | rest ─▶ what it says ─▶ request

This is the way of the first message of a form, of what is malformed or unusual, and of what carries its values beside its raw
tensors. All others are walked over, and are of a form (``message_forms``).
"""

from __future__ import annotations

from collections.abc import Sequence

from daemon.grpc.message_forms import MessageForms
from daemon.grpc.reception import Reception
from daemon.grpc.request_codec import DecodedHead, decode_head
from daemon.grpc.request_fields import Buffer, RefusedRequest, split
from daemon.submit.inference import Content, InferenceRequest
from daemon.submit.model_table import ModelTable
from shm.control_records import ModelState
from shm.errors import InvalidArgument, ServingError

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
        try:
            decoded = self._forms.decoded(head, len(raws)) or decode_head(head, bool(raws), self._table)
            state = self._table.find(decoded.model, decoded.version)
            request = decoded.request(text, raws)
        except ServingError as error:
            raise RefusedRequest(error, text) from None
        self._forms.learn(head, decoded)
        return decoded, request, state
