"""What inference requests of one kind say over HTTP, and where the bytes lie that each has of its own. Sans-I/O.

    HttpForm ─▶ prepared ─▶ Numbered (tensord.shm.prepared)     what workers are told once
             ├▶ sources                          where its tensors are: in the body, a region, the JSON
             ╰▶ AnswerText, a few                what the answers say but for their ids and tensors

Two texts that mean the same are one form: its id, what schedules it (``submit.scheduling``), the values of its tensors, the order
of its keys and the head that it came with are no part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

import msgspec

from tensord.daemon.http.answer_text import AnswerText
from tensord.daemon.http.decoded_request import DecodedRequest, Part, Source
from tensord.daemon.http.message_head import InferHead
from tensord.daemon.submit.scheduling import UNSCHEDULED, Scheduling
from tensord.shm.messages import AnswerRecord, PreparedAnswer, PreparedRequest, RegionSlice, Slice
from tensord.shm.prepared import Numbered, Numbers

#: Answers of one form differ by worker and load; more than these are found out again.
_MAX_ANSWERS = 16
#: Stands for tensors that come in the JSON: each request has its own.
VALUES: Final = b""


class HttpForm:
    """One kind of requests, of all connections of a front."""

    __slots__ = (
        "_answers",
        "asked",
        "has_values",
        "last_answer",
        "last_said",
        "model",
        "numbered",
        "placed",
        "prepared",
        "sources",
        "tail_size",
        "unpack",
    )

    def __init__(self, head: InferHead, asked: DecodedRequest) -> None:
        #: As requests name it.
        self.model = head.model
        self.prepared: PreparedRequest = asked.prepared(head.model, head.version, head.forwarded)
        #: What the JSON said; not its id, its scheduling, nor the values in it.
        self.asked = asked
        self.sources: list[Source] = [
            source if isinstance(source, Part | RegionSlice) else VALUES for _, _, _, source in asked.inputs
        ]
        self.has_values = any(source is VALUES for source in self.sources)
        #: Of all its binary parts together.
        self.tail_size = sum([source.byte_size for source in self.sources if type(source) is Part])
        #: Its number on the lanes, once such requests have come twice.
        self.numbered: Numbered[PreparedRequest] | None = None
        #: Takes the tensors out of a small body; None: not all of them travel in the record.
        self.unpack: Callable[[bytes, int], tuple[Any, ...]] | None = None
        #: Its parts, where none of its tensors travels in the record: so they lie in a body that is placed; None: look at each.
        self.placed: list[Part] | None = None
        #: What the last request whose text was not known said of itself.
        self.last_said: tuple[str, Scheduling] = "", UNSCHEDULED
        self._answers: dict[int, AnswerText] = {}
        #: The one that was asked for last: mostly it is asked for again.
        self.last_answer: AnswerText | None = None

    def on_lane(self, numbers: Numbers[PreparedRequest], inline_byte_size: int) -> Numbered[PreparedRequest] | None:
        """None: it is the first of its kind, and the record says everything."""
        if self.numbered is None:
            self.numbered = numbers.number_again(self.prepared)
            parts = [source for source in self.sources if type(source) is Part]
            sizes = [part.byte_size for part in parts]
            if self.numbered is not None and not self.has_values:
                if max(sizes, default=0) <= inline_byte_size:
                    self.unpack = Struct("".join([f"{size}s" for size in sizes])).unpack_from
                elif min(sizes) > inline_byte_size:
                    self.placed = parts
        return self.numbered

    def answer(self, prepared: PreparedAnswer, own: AnswerRecord, view: Callable[[Slice], memoryview]) -> AnswerText:
        """Returns the text of answers of that kind. Raises InvalidArgument: its tensors are outside of the arena."""
        known = self._answers.get(id(prepared))
        if known is None or known.prepared is not prepared:
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            known = self._answers[id(prepared)] = AnswerText(self.model, self.asked, prepared, own, view)
        self.last_answer = known
        return known

    def __repr__(self) -> str:
        return f"<HttpForm for {self.model!r}>"


class Request(msgspec.Struct, frozen=True):
    """A request as its text says it."""

    form: HttpForm
    id: str
    #: Of each input: where the form says that it is, or its values.
    sources: list[Source]
    scheduling: Scheduling = UNSCHEDULED
