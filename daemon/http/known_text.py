"""A JSON that comes again with the same head: the form of its requests, and their answer. Sans-I/O.

    KnownText ◁── KnownRequest         tensors in the record, or in regions (known_request)
              ◁── KnownLargeRequest    tensors in the body's lease as well (known_large_request)

The same text means the same, so neither is read or written again, and the lane is told only what is new (``shm.forms``).
"""

from __future__ import annotations

from daemon.http.decoded_request import DecodedRequest, Part
from daemon.http.known_answer import KnownAnswer
from daemon.http.message_head import InferHead
from shm.forms import Form, Forms, request_template
from shm.messages import Inline, Place, RegionSlice, Submit, Tensor

#: Longer texts are not worth remembering with every connection.
MAX_TEXT = 2048


class KnownText:
    """Base of what one connection remembers."""

    __slots__ = ("_tensors", "answer", "decoded", "edition", "form", "head")

    def __init__(self, head: InferHead, decoded: DecodedRequest, tensors: tuple[Tensor, ...]) -> None:
        """``tensors``: the inputs but for their bytes."""
        self.head = head
        self.decoded = decoded
        self._tensors = tensors
        self.answer = KnownAnswer(head.model, decoded)
        #: Of the table of models when one that such requests may ask for was last found there. -1: it was not looked for.
        self.edition = -1
        self.form: Form[Submit] | None = None

    def admitted(self, edition: int, forms: Forms[Submit]) -> None:
        """Its model is there. Only now its form is made: most texts with an id never come again."""
        self.edition = edition
        if self.form is None:
            self.form = forms.form(request_template(self.decoded.record(0, self.head, self._tensors, 0)))


def without_bytes(decoded: DecodedRequest) -> tuple[Tensor, ...] | None:
    """The inputs but for their bytes; None: some come in the JSON, or the next request will have another id."""
    if decoded.id_is_made:
        return None
    tensors: list[Tensor] = []
    for name, datatype, shape, source in decoded.inputs:
        place: Place
        if isinstance(source, RegionSlice):
            place = source
        elif isinstance(source, Part):
            place = Inline(b"")
        else:
            return None
        tensors.append(Tensor(name, datatype, shape, place))
    return tuple(tensors)


def parts_of(decoded: DecodedRequest) -> list[Part]:
    """Those of the inputs that lie in no region, in their order: one behind the other."""
    return [source for _, _, _, source in decoded.inputs if isinstance(source, Part)]
