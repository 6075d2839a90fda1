"""The way of every inference request over HTTP from its JSON to its form. Sans-I/O.

    text ─▶ the same text before ────────────────────────────────────────────▶ Request: form, id, sources
         ├▶ quick (request_head) ─▶ what it says ─▶ said before ─────────────▶
         │                                       ╰▶ checked (request_codec) ─▶
         ╰▶ exact: what the quick way does not understand ───────────────────▶

Forms are found by what requests mean, on whichever connection: model, version, names, datatypes, shapes, sizes, regions, outputs
and parameters. A known one is not checked again but for what is the request's own: sizes, values, priority, timeout, sequence.
"""

from __future__ import annotations

from typing import Any

from tensord.daemon.front.memo import Memo
from tensord.daemon.http import request_codec, request_head
from tensord.daemon.http.decoded_request import DecodedRequest, Source
from tensord.daemon.http.http_form import VALUES, HttpForm, Request
from tensord.daemon.http.json_cut import Cut
from tensord.daemon.http.message_head import MAX_TEXT, InferHead, TextKey
from tensord.daemon.http.request_head import ABSENT, Malformed, RequestHead
from tensord.daemon.http.request_parameters import part
from tensord.daemon.submit.scheduling import UNSCHEDULED
from tensord.shm.datatypes import element_count
from tensord.shm.open_shape import is_open
from tensord.shm.prepared import MAX_NUMBERS

#: What longer ones say, but for large data, is not remembered.
_MAX_SAID = 4096


class HttpForms:
    """One per front."""

    def __init__(self, count: int = MAX_NUMBERS) -> None:
        """``count``: so many are remembered at least, and as many texts."""
        #: By what is said.
        self._forms: Memo[Any, HttpForm] = Memo(count)
        #: By model, version, size of the tensors behind it, and text: of those that come again with the same id and scheduling.
        self.texts: Memo[tuple[TextKey, bytes], Request] = Memo(count)

    def read(self, head: InferHead, text: bytes | memoryview, tail_size: int, apart: Cut | None = None) -> Request:
        """What a request says with that head, and binary parts of ``tail_size`` bytes together.

        ``apart``: what ``json_cut`` found, of a text longer than ``request_codec.MAX_UNCUT``.
        Raises: as ``request_codec.decode``.
        """
        if len(text) > MAX_TEXT or head.forwarded is not None:
            return self._read(head, text if apart is None else apart.text, tail_size, apart)
        key = (head.model, head.version, tail_size), bytes(text)
        return self.texts[key] or self.meet(head, key)

    def meet(self, head: InferHead, key: tuple[TextKey, bytes]) -> Request:
        """What a text says that is not among ``texts``. Raises as ``read``."""
        (_, _, tail_size), text = key
        request = self._read(head, text, tail_size, None)
        form = request.form
        # What one step of a sequence says, its next one mostly says again, whatever others say between them.
        said = request.id, UNSCHEDULED if request.scheduling.goes_on else request.scheduling
        if form.last_said != said:
            form.last_said = said
        elif not form.has_values:
            self.texts.put(key, request)
        return request

    def _read(self, head: InferHead, text: bytes | memoryview, tail_size: int, apart: Cut | None) -> Request:
        try:
            said = request_head.quick(text)
            scheduling, parameters = part(said.parameters) if said.parameters else (UNSCHEDULED, None)
            key = (
                head.model,
                head.version,
                tuple([(of.name, of.datatype, of.shape, of.parameters, of.data is ABSENT) for of in said.inputs]),
                said.outputs,
                # As text: 1, 1.0 and true are equal, and not the same.
                repr((parameters, head.forwarded)) if parameters or head.forwarded else None,
            )
            form = self._forms[key]
            if form is not None and form.tail_size == tail_size:
                sources = _values(form, said, apart) if form.has_values else form.sources
                return Request(form, said.id, sources, scheduling)
            decoded = request_codec.decode_head(said, apart, tail_size, head.model)
        except Malformed as reason:
            return request_of(head, request_codec.decode_exactly(text, apart, tail_size, head.model, reason))
        request = request_of(head, decoded)
        if len(text) <= _MAX_SAID and not any(not absent and is_open(shape) for _, _, shape, _, absent in key[2]):
            self._forms.put(key, request.form)
        return request

    def __repr__(self) -> str:
        return f"<HttpForms {len(self._forms)}, texts {len(self.texts)}>"


def request_of(head: InferHead, decoded: DecodedRequest) -> Request:
    """One whose form is not looked for by what its text says."""
    sources = [source for _, _, _, source in decoded.inputs]
    return Request(HttpForm(head, decoded), decoded.id, sources, decoded.scheduling)


def _values(form: HttpForm, said: RequestHead, apart: Cut | None) -> list[Source]:
    """Raises InvalidArgument, Malformed: as they would for the first of its kind, because all else is right."""
    sources: list[Source] = []
    for source, (_, datatype, _, _), entry in zip(form.sources, form.asked.inputs, said.inputs, strict=True):
        if source is VALUES:
            entry.datatype = datatype  # by the name that it has here
            source = request_codec.read_values(entry, element_count(entry.shape), apart)
        sources.append(source)
    return sources
