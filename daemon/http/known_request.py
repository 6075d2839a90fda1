"""An inference request that repeats itself: the same JSON with other tensors behind it, and what its answer looks like. Sans-I/O.

    chunk    | head | JSON, as last time | part | part | ...       parts of the same sizes, so they lie at the same places
    answer   | head and JSON, as last time | part | ...            while the worker answers in the same form

The same text means the same, so neither is read or written again, and the lane is told only what is new (``shm.forms``).
"""

from __future__ import annotations

from struct import Struct

from daemon.http.decoded_request import DecodedRequest, Part
from daemon.http.message_head import InferHead
from daemon.http.response_codec import encode, response_head
from shm.forms import Form, Forms, no_view, request_template, whole_answer
from shm.messages import Completion, FormCompletion, FormSubmit, Inline, Place, RegionSlice, Submit, Tensor

#: Longer texts are not worth remembering with every connection.
_MAX_TEXT = 2048
#: Longer answers to them neither.
_MAX_ANSWER_HEAD = 2048


class KnownRequest:
    """One connection's. Its tensors travel in the record or lie in regions."""

    __slots__ = (
        "_answer",
        "_answer_sizes",
        "_answered",
        "_contents",
        "_tensors",
        "decoded",
        "edition",
        "form",
        "head",
        "request_size",
        "start",
    )

    def __init__(
        self,
        start: bytes,
        head: InferHead,
        decoded: DecodedRequest,
        tensors: tuple[Tensor, ...],
        sizes: list[int],
    ) -> None:
        #: The chunk's bytes before its first part, and how many it has in all.
        self.start = start
        self.request_size = len(start) + sum(sizes)
        self.head = head
        self.decoded = decoded
        #: Its inputs but for their bytes, and what takes those out of the chunk.
        self._tensors = tensors
        self._contents = Struct(f"{len(start)}x" + "".join([f"{size}s" for size in sizes])).unpack
        #: Of the table of models when one that such requests may ask for was last found there. -1: it was not looked for.
        self.edition = -1
        self.form: Form[Submit] | None = None
        #: What the last answer's form is, the bytes before its parts, and how long those are: None where it is not remembered.
        self._answered: Completion | None = None
        self._answer = b""
        self._answer_sizes: list[int] | None = None

    def admitted(self, edition: int, forms: Forms[Submit]) -> None:
        """Its model is there. Only now its form is made: most texts with an id never come again."""
        self.edition = edition
        if self.form is None:
            self.form = forms.form(request_template(self.decoded.record(0, self.head, self._tensors, 0)))

    def record(self, request_id: int, chunk: bytes, received_ns: int) -> FormSubmit:
        """The request that is that chunk."""
        assert self.form is not None
        return FormSubmit(request_id, self.form.number, self._contents(chunk), self.decoded.id, 0, received_ns)

    def answer(self, template: Completion, own: FormCompletion) -> bytes | None:
        """The whole answer of a connection that stays; None: it is not of a kind that is remembered."""
        if template is not self._answered:
            self._learn(template, own)
        if [*map(len, own.contents)] != self._answer_sizes:  # type: ignore[arg-type]
            return None
        return b"".join((self._answer, *own.contents))  # type: ignore[arg-type]

    def _learn(self, template: Completion, own: FormCompletion) -> None:
        decoded, self._answered, self._answer_sizes = self.decoded, template, None
        for tensor in template.outputs:
            if type(tensor.place) is Inline and not decoded.binary.get(tensor.name, decoded.all_binary):
                return  # its values are in the JSON
        whole = whole_answer(template, own)
        text, parts = encode(whole, self.head.model, decoded.id, decoded.binary, decoded.all_binary, no_view)
        head = response_head(len(text), parts) + text
        if len(head) <= _MAX_ANSWER_HEAD:
            self._answer, self._answer_sizes = head, [*map(len, parts)]


def recognise(
    start: bytes, text_size: int, head: InferHead, decoded: DecodedRequest, inline_byte_size: int
) -> KnownRequest | None:
    """What to remember of a request with that head.

    Args:
      start: its bytes before the first part: the head's, and ``text_size`` bytes of JSON.
    Returns: None: it has tensors that come in the JSON, or are too large to travel in the record.
    """
    if text_size > _MAX_TEXT:
        return None
    tensors: list[Tensor] = []
    sizes: list[int] = []
    for name, datatype, shape, source in decoded.inputs:
        place: Place
        if isinstance(source, RegionSlice):
            place = source
        elif isinstance(source, Part) and source.byte_size <= inline_byte_size:
            # Parts lie one behind the other, in this order.
            sizes.append(source.byte_size)
            place = Inline(b"")
        else:
            return None
        tensors.append(Tensor(name, datatype, shape, place))
    return KnownRequest(start, head, decoded, tuple(tensors), sizes)
