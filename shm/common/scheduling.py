"""Defines the scheduling parameters of requests, such as priority and timeout, for fronts, workers and clients.

    HTTP, gRPC   parameters {"timeout": 500} ─▶ Scheduling(timeout_us=500) ─▶ the last fields of the request's record
    Python       model(x, timeout_us=500) ────▶

To add a parameter, add it here as the last one, to ``shm.messages.RequestRecord`` as the last field, and to tensord_wire.h.
Fronts and clients then accept it and workers get it. This module does not import numpy.
"""

from __future__ import annotations

import enum
import re
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict, Union

from .errors import InvalidArgument, Unsupported

SequenceId = Union[int, str]
Parameter = Union[bool, int, float, str]
#: The request parameter that names a parameter set.
SET_PARAMETER = "parameter_set"
_TRACEPARENT = re.compile(r"[ \t]*([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?[ \t]*")


class Scheduling(NamedTuple):
    """Says when a request is run, in which sequence, which waiting request it replaces, and with which parameter set."""

    #: 1 is the most urgent; 0: the model's default.
    priority: int = 0
    #: How long it may wait in its queue; 0: as its model says.
    timeout_us: int = 0
    #: 0 and "": it is in no sequence. 5 and "5" are two sequences.
    sequence_id: SequenceId = 0
    sequence_start: bool = False
    sequence_end: bool = False
    #: A key: while the request waits, the next request of that key takes its place; "": it has none.
    replace_key: str = ""
    #: The parameter set that it is computed with; "": the model's main set.
    parameter_set: str = ""

    @property
    def goes_on(self) -> bool:
        """Returns whether the request is in a sequence, but is neither the sequence's first request nor its last one."""
        return bool(self.sequence_id) and not self.sequence_start and not self.sequence_end


class Arguments(TypedDict, total=False):
    """The keyword arguments that calls of a model take besides tensors: scheduling, an id, and parameters for the model."""

    #: Name -> value, for the model.
    parameters: Mapping[str, Parameter]
    #: A text that the server notes with the request.
    request_id: str
    priority: int
    timeout_us: int
    sequence_id: SequenceId
    sequence_start: bool
    sequence_end: bool
    replace_key: str


#: A request has this that says nothing of it.
UNSCHEDULED = Scheduling()


class Kind(enum.Enum):
    """Says which type of value a scheduling parameter of a request has, for example a duration or a flag."""

    #: An integer of 64 bits without a sign.
    NUMBER = "number"
    #: An integer like NUMBER, of microseconds; over gRPC it is of 64 bits with a sign, as for Triton.
    DURATION = "duration"
    #: True or false.
    FLAG = "flag"
    TEXT = "text"
    #: A number, or a text.
    SEQUENCE_ID = "sequence id"
    #: A text that is not empty.
    SET_NAME = "set name"


class Row(NamedTuple):
    """Describes one scheduling parameter in the table ``PARAMETERS``."""

    #: A field of ``Scheduling`` and of the record; also the keyword argument in Python, but for the name of a set.
    field: str
    kind: Kind
    #: The most bytes of a text.
    most: int = 0


#: Every parameter, by its name over HTTP and gRPC.
PARAMETERS = {
    "priority": Row("priority", Kind.NUMBER),
    "timeout": Row("timeout_us", Kind.DURATION),
    "sequence_id": Row("sequence_id", Kind.SEQUENCE_ID, 128),
    "sequence_start": Row("sequence_start", Kind.FLAG),
    "sequence_end": Row("sequence_end", Kind.FLAG),
    "tensord_replace": Row("replace_key", Kind.TEXT, 128),
    SET_PARAMETER: Row("parameter_set", Kind.SET_NAME, 128),
}
MAX_SEQUENCE_ID = PARAMETERS["sequence_id"].most


def set_named(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Removes the name of a parameter set from a request's parameters. Returns the other parameters, and the name or "".

    Raises InvalidArgument if the name is not a str or is empty.
    """
    others = dict(parameters)
    name = others.pop(SET_PARAMETER, None)
    if name is None:
        return others, ""
    if not isinstance(name, str):
        raise InvalidArgument(
            f"parameter '{SET_PARAMETER}' is {reprlib.repr(name)}, the name of a parameter set is expected"
        )
    return others, checked_text(name, Kind.SET_NAME)


def checked_text(text: str, kind: Kind) -> str:
    """Returns ``text``, the value of a scheduling parameter of this kind, if it is valid.

    Raises: InvalidArgument: the name of a parameter set is empty.  Unsupported: a sequence id has more than 128 bytes.
    """
    if kind is Kind.SEQUENCE_ID and len(text.encode(errors="replace")) > MAX_SEQUENCE_ID:
        raise Unsupported(f"string correlation ID cannot be longer than {MAX_SEQUENCE_ID} characters")
    if kind is Kind.SET_NAME and not text:
        raise InvalidArgument(f"parameter '{SET_PARAMETER}' is empty, the name of a parameter set is expected")
    return text


def sampled(traceparent: str) -> tuple[str, str] | None:
    """Returns the trace id and the span id in a W3C ``traceparent``.

    Returns None if the ``traceparent`` is malformed or says "not sampled". Source: W3C Trace Context.
    """
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return (trace_id, span_id) if int(flags, 16) & 1 else None
