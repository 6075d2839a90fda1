"""One request, in the form in which every kind of connection accepts it."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Union

import numpy as np

from .errors import InvalidArgument
from .results import Array, Parameter

SequenceId = Union[int, str]
#: The most requests that wait in this process for a worker, or for an HTTP connection, beyond those that are sent.
MAX_WAITING = 1 << 16
#: The most bytes of a sequence's id that is a text.
_MAX_SEQUENCE_ID = 128
#: Seconds (31 years) from which on a timeout is no limit.
FOREVER = 1e9
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Own(TypedDict, total=False):
    """The keyword arguments that calls of a model take besides tensors, such as ``priority``; ``Call.__init__`` explains each."""

    parameters: Mapping[str, Parameter]
    request_id: str
    priority: int
    timeout_us: int
    sequence_id: SequenceId
    sequence_start: bool
    sequence_end: bool
    replace_key: str
    traceparent: str


def checked(own: Mapping[str, Any]) -> dict[str, Any]:
    """Checks keyword arguments of a request, and returns them in Python's types (no numpy scalars), without those that are None.

    Raises: InvalidArgument: a value is of another type or out of range.  TypeError: a request has no such field.
    """
    if unknown := own.keys() - _CHECKS.keys():
        raise TypeError(f"a request to a model has no {', '.join(sorted(unknown))}")
    return {name: _CHECKS[name](name, value) for name, value in own.items() if value is not None}


def _natural(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, a whole number is expected") from None
    if not 0 <= number < 1 << 64:
        raise InvalidArgument(f"{name} is {reprlib.repr(number)}, at least 0 and less than 2**64 is expected")
    return number


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, a text is expected")
    return str.__str__(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, True or False is expected")
    return bool(value)


def _traceparent(name: str, value: Any) -> str:
    """Returns a ``traceparent`` as W3C Trace Context has it; "": it is malformed, or not sampled, which servers ignore."""
    found = _TRACEPARENT.fullmatch(_text(name, value).strip())
    if found is None:
        return ""
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return ""
    return f"00-{trace_id}-{span_id}-01" if int(flags, 16) & 1 else ""


def _sequence(name: str, value: Any) -> SequenceId:
    if not isinstance(value, str):
        return _natural(name, value)
    if len(value.encode(errors="replace")) > _MAX_SEQUENCE_ID:
        raise InvalidArgument(
            f"{name} is {reprlib.repr(value)}, a text of {_MAX_SEQUENCE_ID} bytes at most is expected"
        )
    return str.__str__(value)


def _parameters(name: str, value: Any) -> dict[str, Parameter]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} are {reprlib.repr(value)}, a mapping of names to values is expected")
    return {_text("the name of a parameter", key): _parameter(key, each) for key, each in value.items()}


def _parameter(name: str, value: Any) -> Parameter:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        if not -1 << 63 <= value < 1 << 64:
            raise InvalidArgument(f"parameter '{name}' is {reprlib.repr(value)}, which takes more than 64 bits")
        return value if isinstance(value, bool) else int(value)
    if isinstance(value, float):
        return float(value)
    if not isinstance(value, str):
        raise InvalidArgument(f"parameter '{name}' is {reprlib.repr(value)}, a bool, a number or a text is expected")
    return str.__str__(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "parameters": _parameters,
    "request_id": _text,
    "priority": _natural,
    "timeout_us": _natural,
    "sequence_id": _sequence,
    "sequence_start": _flag,
    "sequence_end": _flag,
    "replace_key": _text,
    "traceparent": _traceparent,
}


def named(name: Any, version: Any) -> tuple[str, int]:
    """Checks and returns a model's name and version. Raises InvalidArgument: no text, or no whole number from 0 on."""
    return _text("a model's name", name), _natural("a model's version", version)


def seconds(timeout: Any) -> float | None:
    """Checks a timeout in seconds and returns it; None if it is None or infinite: no limit. Raises InvalidArgument: no number."""
    if timeout is None:
        return None
    try:
        number = float(timeout)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(timeout, str) or math.isnan(number):
        raise InvalidArgument(f"timeout is {reprlib.repr(timeout)}, a number of seconds or None is expected")
    return number if number < FOREVER else None


class Call:
    """A request: the model, its input arrays and everything else that is sent with them.

    ``inputs`` are C-contiguous arrays by name. Arrays of the connection's ``empty`` are used where they lie; any others are
    copied, or sent with the request. Arrays of numpy's kinds S, U and O (strings, objects) are BYTES. ``places``: output
    name -> the array that the output is written to.
    """

    __slots__ = (
        "deadline",
        "detached",
        "inputs",
        "layouts",
        "model",
        "outputs",
        "parameter_set",
        "parameters",
        "places",
        "priority",
        "pure",
        "replace_key",
        "request_id",
        "sequence_end",
        "sequence_id",
        "sequence_start",
        "streams",
        "timeout_us",
        "traceparent",
        "version",
    )

    def __init__(
        self,
        model: str,
        inputs: dict[str, Array],
        *,
        version: int = 0,
        outputs: Sequence[str] = (),
        places: Mapping[str, Array] | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
        priority: int = 0,
        timeout_us: int = 0,
        sequence_id: SequenceId = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        replace_key: str = "",
        parameter_set: str = "",
        traceparent: str = "",
        deadline: float | None = None,
        streams: bool = False,
        pure: bool = False,
        detached: bool = False,
    ) -> None:
        """Makes a request; nothing is sent.

        Args:
          version: the model's version; 0: the newest.
          outputs: names of the outputs to return; empty: all of them.
          places: output name -> the array that the output is written to.
          parameters: the request's parameters, for the model.
          request_id: a text that the server notes with the request; "": none.
          priority: the level in the model's queue, 1 is the first to run; 0: the model's default.
          timeout_us: microseconds that the request may wait in the model's queue; 0: as long as the model's queue policy says.
          sequence_id: the sequence that the request belongs to; 0 or "": none.
          sequence_start, sequence_end: whether the request is the first, and the last, of its sequence.
          replace_key: while the request is in the queue, the next request with the same key replaces it (Replaced); "": never.
          parameter_set: the model's parameter set that the answer is computed with; "": ``main``.
          traceparent: the trace and the span in it that the request belongs to, as W3C Trace Context has them; "": to none.
          deadline: seconds of ``time.monotonic()``, after which the caller does not wait any more; None: no deadline.
          streams: whether any number of responses is expected, in place of exactly one.
          pure: whether running the request twice does no harm, so that it may be sent again after a failure.
          detached: whether the caller goes on before the answer has come, and may write to the input arrays meanwhile.
        """
        self.model = model
        self.inputs = inputs
        self.version = version
        self.outputs = outputs
        self.places = places or {}
        self.parameters = parameters or {}
        self.request_id = request_id
        self.priority = priority
        self.timeout_us = timeout_us
        self.sequence_id = sequence_id
        self.sequence_start = sequence_start
        self.sequence_end = sequence_end
        self.replace_key = replace_key
        self.parameter_set = parameter_set
        self.traceparent = traceparent
        self.deadline = deadline
        self.streams = streams
        self.pure = pure
        self.detached = detached
        #: Layouts that a connection keeps for a call that is sent many times; None: the call is sent once.
        self.layouts: dict[Any, Any] | None = None

    @property
    def is_bare(self) -> bool:
        """Returns whether the request has no parameters, id, priority, queue timeout, sequence, replace key, set or trace."""
        return not (
            self.parameters
            or self.request_id
            or self.priority
            or self.timeout_us
            or self.sequence_id
            or self.replace_key
            or self.parameter_set
            or self.traceparent
        )
