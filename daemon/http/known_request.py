"""An inference request that repeats itself: the same JSON with other tensors behind it, and what its answer looks like. Sans-I/O.

    chunk    | head | JSON, as last time | part | part | ...       parts of the same sizes, so they lie at the same places
    answer   | head and JSON, as last time | part | ...            while the worker answers in the same form

The same text means the same, so neither is read or written again, and the lane is told only what is new (``shm.forms``).
"""

from __future__ import annotations

from daemon.http.decoded_request import DecodedRequest, Part
from daemon.http.message_head import InferHead
from daemon.http.response_codec import encode, response_head
from shm.forms import Form, Forms, no_view, request_template, whole_answer
from shm.messages import Completion, FormCompletion, Inline, Place, RegionSlice, Submit, Tensor

#: Longer texts are not worth remembering with every connection.
_MAX_TEXT = 2048
#: Longer answers to them neither.
_MAX_ANSWER_HEAD = 2048


class KnownRequest:
    """One connection's. Its tensors travel in the record or lie in regions."""

    __slots__ = ("_answer", "_answered", "_byte_size", "_form", "_head", "_parts", "_tensors", "decoded", "text")

    def __init__(
        self,
        head: InferHead,
        text: bytes,
        decoded: DecodedRequest,
        tensors: tuple[Tensor, ...],
        parts: list[tuple[int, int]],
    ) -> None:
        self._head = head
        self.text = text
        self.decoded = decoded
        #: Its inputs but for their bytes, and where in the chunk those begin and end that it holds.
        self._tensors = tensors
        self._parts = parts
        self._form: Form[Submit] | None = None
        #: What the last answer's form is, and the bytes before its parts: empty where such answers are not remembered.
        self._answered: Completion | None = None
        self._answer = b""
        #: How long the parts are.
        self._byte_size = 0

    def form(self, forms: Forms[Submit]) -> Form[Submit]:
        """What it has in common with others of its kind. Made when it comes again, which most texts with an id never do."""
        if self._form is None:
            self._form = forms.form(request_template(self.decoded.record(0, self._head, self._tensors, 0)))
        return self._form

    def contents(self, chunk: bytes) -> tuple[bytes, ...]:
        """The tensors in the request that is that chunk."""
        return tuple([chunk[start:end] for start, end in self._parts])

    def answer(self, template: Completion, completion: FormCompletion) -> bytes | None:
        """The whole answer of a connection that stays; None: it is not of a kind that is remembered."""
        if template is not self._answered:
            self._learn(template, completion)
        if not self._answer or sum(map(len, completion.contents)) != self._byte_size:
            return None
        return b"".join((self._answer, *completion.contents))

    def _learn(self, template: Completion, completion: FormCompletion) -> None:
        decoded, self._answered, self._answer = self.decoded, template, b""
        for tensor in template.outputs:
            if type(tensor.place) is Inline and not decoded.binary.get(tensor.name, decoded.all_binary):
                return  # its values are in the JSON
        whole = whole_answer(template, completion)
        text, parts = encode(whole, self._head.model, decoded.id, decoded.binary, decoded.all_binary, no_view)
        head = response_head(len(text), parts) + text
        if len(head) <= _MAX_ANSWER_HEAD:
            self._answer, self._byte_size = head, sum(map(len, parts))


def recognise(
    text: bytes, start: int, head: InferHead, decoded: DecodedRequest, inline_byte_size: int
) -> KnownRequest | None:
    """What to remember of a request with that head, whose JSON is ``text`` and whose parts begin at ``start`` of its chunk.

    None: it has tensors that come in the JSON, or are too large to travel in the record.
    """
    if len(text) > _MAX_TEXT:
        return None
    tensors: list[Tensor] = []
    parts: list[tuple[int, int]] = []
    for name, datatype, shape, source in decoded.inputs:
        place: Place
        if isinstance(source, RegionSlice):
            place = source
        elif isinstance(source, Part) and source.byte_size <= inline_byte_size:
            begin = start + source.offset
            parts.append((begin, begin + source.byte_size))
            place = Inline(b"")
        else:
            return None
        tensors.append(Tensor(name, datatype, shape, place))
    return KnownRequest(head, text, decoded, tuple(tensors), parts)
