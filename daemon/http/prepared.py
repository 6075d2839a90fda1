"""Parses the JSON of HTTP inference requests, and caches what similar requests have in common. Sans-I/O.

Requests are similar if they differ only in id, tensor values and scheduling parameters, such as the priority. If a similar
request is in the cache, only the parts that may differ are checked. A second cache maps whole JSON texts to parsed requests.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import msgspec

from tensord.daemon.front.bounded_cache import BoundedCache
from tensord.daemon.http import request_codec, request_head, response_codec
from tensord.daemon.http.decoded_request import BinaryPart, DecodedRequest, Source
from tensord.daemon.http.json_cut import Cut
from tensord.daemon.http.json_text import View
from tensord.daemon.http.message_head import MAX_TEXT, InferHead, TextKey
from tensord.daemon.http.request_codec import part
from tensord.daemon.http.request_head import ABSENT, RequestHead, UnusualText
from tensord.shm.common.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.datatypes import OPEN
from tensord.shm.messages import (
    AnswerRecord,
    Buffer,
    PreparedAnswer,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    Slice,
)
from tensord.shm.prepared import MAX_NUMBERS, Numbered, Numbers

#: The most kinds of answers cached for one kind of requests (they differ by worker and load); beyond it the cache is emptied.
_MAX_ANSWERS = 16
#: Stands for tensors that come in the JSON: each request has its own.
VALUES: Final = b""
#: Kinds of requests whose JSON, without large data, is longer are not cached.
_MAX_SAID = 4096
#: Parameters of a request that are longer, as text, are not cached.
_MAX_PART = 512
#: JSON heads of answers that are longer are not cached.
_MAX_TEXT = 2048
_encode = msgspec.json.Encoder().encode


class PreparedRequests:
    """Parses the inference requests of a front, and caches what similar requests share.

    Requests are similar if they differ only in id, scheduling parameters and tensor values.
    """

    def __init__(self, count: int = MAX_NUMBERS, inline_byte_size: int = 0) -> None:
        """Creates the caches of prepared requests. Each cache holds at most ``count`` entries.

        ``inline_byte_size``: the most bytes of a request's tensors that are sent to the worker inside the request's record.
        """
        self._inline_byte_size = inline_byte_size
        #: The fields that all requests of a kind share -> the kind.
        self._known: BoundedCache[Any, PreparedKind] = BoundedCache(count)
        #: (Model, version, bytes of tensors behind the JSON), JSON -> the parsed request. Holds texts that came more than once.
        self.texts: BoundedCache[tuple[TextKey, bytes], ParsedRequest] = BoundedCache(count)
        #: The parameters of a request as text -> its scheduling, and the other parameters as text ("": none).
        self._parts: BoundedCache[str, tuple[Scheduling, str]] = BoundedCache(count)

    def read(
        self, head: InferHead, text: bytes | memoryview, tail_size: int, apart: Cut | None = None
    ) -> ParsedRequest:
        """Parses ``text``, the JSON of an inference request, or takes the parsed request from the cache.

        Args:
          head: the HTTP head of the request.
          tail_size: the number of bytes of all binary tensors that follow the JSON.
          apart: the large data that was cut out of the JSON, or None.
        Raises InvalidArgument if the JSON is malformed or contradicts itself.
        Raises Unsupported if a sequence id is a string and too long.
        """
        if len(text) > MAX_TEXT or head.forwarded is not None:
            return self._read(head, text if apart is None else apart.text, tail_size, apart)
        key = (head.model, head.version, tail_size), bytes(text)
        return self.texts[key] or self.meet(head, key)

    def meet(self, head: InferHead, key: tuple[TextKey, bytes]) -> ParsedRequest:
        """Parses an inference request that is not in the cache ``self.texts``. May add the parsed request to this cache.

        ``key``: ((model, version, number of bytes of all binary tensors that follow the JSON), JSON). Raises as ``read`` does.
        """
        (_, _, tail_size), text = key
        request = self._read(head, text, tail_size, None)
        prepared = request.prepared
        if prepared.has_values:
            return request
        # What one step of a sequence says, its next one mostly says again, whatever others say between them; and requests
        # of one kind name many parameter sets.
        scheduling = request.scheduling
        if scheduling is not UNSCHEDULED:
            scheduling = UNSCHEDULED if scheduling.goes_on else scheduling._replace(parameter_set="")
        said = request.id, scheduling
        if prepared.last_said != said:
            prepared.last_said = said
        else:
            self.texts.put(key, request)
        return request

    def _read(self, head: InferHead, text: bytes | memoryview, tail_size: int, apart: Cut | None) -> ParsedRequest:
        try:
            said = request_head.quick(text)
            scheduling, others = self._part(said.parameters) if said.parameters else (UNSCHEDULED, "")
            key = (
                head.model,
                head.version,
                tuple([(of.name, of.datatype, of.shape, of.parameters, of.data is ABSENT) for of in said.inputs]),
                said.outputs,
                (others, repr(head.forwarded)) if others or head.forwarded else None,
            )
            prepared = self._known[key]
            if prepared is not None and prepared.tail_size == tail_size:
                sources = _values(prepared, said, apart) if prepared.has_values else prepared.sources
                return ParsedRequest(prepared, said.id, sources, scheduling)
            decoded = request_codec.decode_head(said, apart, tail_size, head.model)
        except UnusualText as reason:
            return self.prepare(head, request_codec.decode_exactly(text, apart, tail_size, head.model, reason))
        request = self.prepare(head, decoded)
        if len(text) <= _MAX_SAID and not any(OPEN in shape and not absent for _, _, shape, _, absent in key[2]):
            self._known.put(key, request.prepared)
        return request

    def _part(self, given: dict[str, Any]) -> tuple[Scheduling, str]:
        """Separates scheduling parameters, such as the priority, from the other ones in ``given``, a request's parameters.

        Returns the scheduling parameters, and the ``repr`` of a dict of the other parameters. The ``repr`` is "" if there are
        no other parameters.
        """
        # As text: 1, 1.0 and true are equal, and not the same.
        text = repr(given)
        known = self._parts[text]
        if known is None:
            scheduling, others = part(given)
            known = scheduling, repr(others) if others else ""
            if len(text) <= _MAX_PART:
                self._parts.put(text, known)
        return known

    def prepare(self, head: InferHead, decoded: DecodedRequest) -> ParsedRequest:
        """Makes a parsed request from its HTTP head and decoded JSON, without reading or filling the caches of this object."""
        sources = [source for _, _, _, source in decoded.inputs]
        return ParsedRequest(
            PreparedKind(head, decoded, self._inline_byte_size), decoded.id, sources, decoded.scheduling
        )

    def __repr__(self) -> str:
        return f"<PreparedRequests {len(self._known)}, texts {len(self.texts)}>"


def _values(prepared: PreparedKind, head: RequestHead, cut: Cut | None) -> list[Source]:
    sources: list[Source] = []
    for source, (_, datatype, _, _), entry in zip(prepared.sources, prepared.asked.inputs, head.inputs, strict=True):
        if source is VALUES:
            entry.datatype = datatype  # by the name that it has here
            source = request_codec.read_values(entry, cut)
        sources.append(source)
    return sources


class PreparedKind:
    """Holds what inference requests share if they differ only in id, scheduling parameters and tensor values.

    Args:
      head: the HTTP head of the first of these requests.
      asked: the decoded JSON of the first of these requests.
      inline_byte_size: the most bytes of a request's tensors that are sent to a worker within the request's record.
    """

    __slots__ = (
        "_answers",
        "asked",
        "has_values",
        "last_answer",
        "last_said",
        "model",
        "numbered",
        "placed",
        "record",
        "sources",
        "tail_size",
        "unpack",
    )

    def __init__(self, head: InferHead, asked: DecodedRequest, inline_byte_size: int = 0) -> None:
        #: The model's name in the request's path.
        self.model = head.model
        inputs = [
            PreparedTensor(name, datatype, shape, source if isinstance(source, RegionSlice) else None)
            for name, datatype, shape, source in asked.inputs
        ]
        parameters = {**asked.parameters, **head.forwarded} if head.forwarded else asked.parameters
        #: The record with the fields that all requests of this kind share, as it is sent to workers.
        self.record = PreparedRequest(head.model, head.version, tuple(inputs), asked.outputs, parameters)
        #: The decoded JSON of the first request of this kind. Its id, scheduling and values are of that request alone.
        self.asked = asked
        self.sources: list[Source] = [
            source if isinstance(source, BinaryPart | RegionSlice) else VALUES for _, _, _, source in asked.inputs
        ]
        self.has_values = any(source is VALUES for source in self.sources)
        parts = [source for source in self.sources if type(source) is BinaryPart]
        sizes = [part.byte_size for part in parts]
        #: The bytes of all binary parts together.
        self.tail_size = sum(sizes)
        #: The number that stands for this kind on the lanes; None until such a request has come twice.
        self.numbered: Numbered[PreparedRequest] | None = None
        #: Cuts the tensors out of a small body; None: not all of them are sent within the record.
        self.unpack: Callable[[bytes, int], tuple[Any, ...]] | None = None
        #: The binary parts, if none is small enough for the record and all lie in the arena; None: each must be looked at.
        self.placed: list[BinaryPart] | None = None
        if not self.has_values:
            if self.tail_size <= inline_byte_size:
                self.unpack = Struct("".join([f"{size}s" for size in sizes])).unpack_from
            elif min(sizes) > inline_byte_size:
                self.placed = parts
        #: Id and scheduling, without the parameter set, of the last such request whose text was not cached.
        self.last_said: tuple[str, Scheduling] = "", UNSCHEDULED
        self._answers: dict[int, AnswerText] = {}
        #: The cached answer that was used last: mostly it is used again.
        self.last_answer: AnswerText | None = None

    def on_lane(self, numbers: Numbers[PreparedRequest]) -> Numbered[PreparedRequest] | None:
        """Returns the part that requests of this kind share, with the number that stands for the part on lanes.

        Returns None at the first call: only a kind that comes again gets a number. ``numbers``: gives out the numbers.
        """
        if self.numbered is None:
            self.numbered = numbers.number_again(self.record)
        return self.numbered

    def answer(self, prepared: PreparedAnswer, record: AnswerRecord, view: View) -> AnswerText:
        """Returns an object that encodes all answers that share ``prepared`` as HTTP responses.

        The object is cached. If none is cached for ``prepared``, this method makes one from ``record``, the worker's answer.
        ``view``: returns the bytes of a tensor in shared memory.
        Raises InvalidArgument if a tensor of ``record`` is outside the worker's arena.
        """
        known = self._answers.get(id(prepared))
        if known is None or known.prepared is not prepared:
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            known = self._answers[id(prepared)] = AnswerText(self.model, self.asked, prepared, record, view)
        self.last_answer = known
        return known

    def __repr__(self) -> str:
        return f"<PreparedKind for {self.model!r}>"


class ParsedRequest(msgspec.Struct, frozen=True):
    """A parsed inference request: id, scheduling parameters, the sources of its inputs' data, and a ``PreparedKind``."""

    prepared: PreparedKind
    id: str
    #: Where the data of each input is: in the body, in a region, or the values themselves.
    sources: list[Source]
    scheduling: Scheduling = UNSCHEDULED


class AnswerText:
    """Encodes inference answers as HTTP responses. The answers that one object encodes differ only in id and tensor values."""

    __slots__ = ("_head", "_id", "_rest", "_sizes", "_tail_size", "prepared")

    def __init__(
        self,
        model: str,
        asked: DecodedRequest,
        prepared: PreparedAnswer,
        record: AnswerRecord,
        view: View,
    ) -> None:
        """Encodes and stores the HTTP head and JSON that all answers with the same ``prepared`` share, except for the id.

        Stores nothing if the JSON contains tensor values or is longer than ``_MAX_TEXT`` bytes. The methods ``whole`` and
        ``pieces`` then return None. ``record``: one of these answers. The other arguments are those of ``response_codec.encode``.
        Raises InvalidArgument if a tensor of ``record`` is outside the arena of the worker that sent the answer.
        """
        self.prepared = prepared
        #: The bytes of each binary part; None: answers of this kind are not cached.
        self._sizes: list[int] | None = None
        self._tail_size = 0
        self._id = ""
        self._head = self._rest = b""
        for tensor in prepared.outputs:
            if tensor.region is None and not asked.binary.get(tensor.name, asked.all_binary):
                return  # its values are in the JSON
        text, parts = response_codec.encode(prepared, record.contents, model, "", asked, view)
        if len(text) <= _MAX_TEXT:
            self._rest = text[1:]
            self._sizes = [*map(len, parts)]
            self._tail_size = sum(self._sizes)
            self._say("")

    def _say(self, client_id: str) -> None:
        text = b'{"id":%b,%b' % (_encode(client_id), self._rest) if client_id else b"{" + self._rest
        self._head = response_codec.response_head(len(text), self._tail_size) + text
        self._id = client_id

    def whole(self, client_id: str, record: AnswerRecord) -> bytes | None:
        """Returns a whole HTTP response as bytes. ``client_id``: the id that the client gave to the request.

        ``record``: the worker's answer, which must contain the bytes of every tensor.
        Returns None if this object has stored no JSON, or if the stored JSON names other byte sizes of the tensors.
        """
        contents: Any = record.contents
        if [*map(len, contents)] != self._sizes:
            return None
        if client_id != self._id:
            self._say(client_id)
        return b"".join((self._head, *contents))

    def pieces(self, client_id: str, record: AnswerRecord, view: View) -> list[Buffer] | None:
        """Returns what ``whole`` does as pieces: first the response's head and JSON in one piece, then the bytes of each tensor.

        ``view``: returns the memory of a slice. Raises InvalidArgument if a tensor is outside the worker's arena.
        """
        if self._sizes is None:
            return None
        parts: list[Any] = [view(content) if type(content) is Slice else content for content in record.contents]
        if [*map(len, parts)] != self._sizes:
            return None
        if client_id != self._id:
            self._say(client_id)
        return [self._head, *parts]
