"""One request, in the form in which every kind of connection accepts it."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from .arguments import natural, read_arguments, text
from .errors import InvalidArgument
from .results import Array, Parameter
from .scheduling import UNSCHEDULED, Arguments, Scheduling

#: The most requests that wait in this process for a worker, or for an HTTP connection, beyond those that are sent.
MAX_WAITING = 1 << 16
#: Seconds (31 years) from which on a timeout is no limit.
FOREVER = 1e9
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Own(Arguments, total=False):
    """The keyword arguments that calls of a model take besides tensors, such as ``priority``."""

    #: The trace, and the span in it, that the request belongs to, as W3C Trace Context has them.
    traceparent: str


def read(own: Mapping[str, Any], parameter_set: str) -> tuple[Scheduling, dict[str, Any]]:
    """Checks keyword arguments of a request. Returns how it is scheduled, and the others: id, parameters and traceparent.

    ``parameter_set``: the parameter set where the arguments name none; "": ``main``.

    Raises: InvalidArgument: a value is of another type or out of range.  TypeError: a request has no such argument.
    """
    return read_arguments(own, parameter_set, traceparent=_traceparent)


def _traceparent(name: str, value: Any) -> str:
    """Returns a ``traceparent`` as W3C Trace Context has it; "": it is malformed, or not sampled, which servers ignore."""
    found = _TRACEPARENT.fullmatch(text(name, value).strip())
    if found is None:
        return ""
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return ""
    return f"00-{trace_id}-{span_id}-01" if int(flags, 16) & 1 else ""


def named(name: Any, version: Any) -> tuple[str, int]:
    """Checks and returns a model's name and version. Raises InvalidArgument: no text, or no whole number from 0 on."""
    return text("a model's name", name), natural("a model's version", version)


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
        "last",
        "layouts",
        "model",
        "outputs",
        "parameters",
        "places",
        "pure",
        "request_id",
        "scheduling",
        "streams",
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
        scheduling: Scheduling = UNSCHEDULED,
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
          scheduling: when it is to be run, in which sequence, and with which parameter set.
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
        self.scheduling = scheduling
        self.traceparent = traceparent
        self.deadline = deadline
        self.streams = streams
        self.pure = pure
        self.detached = detached
        #: Layouts that a connection keeps for a call that is sent many times; None: the call is sent once.
        self.layouts: dict[Any, Any] | None = None
        #: The last request of a call that is sent many times, if its answer did not come at once.
        self.last: Any = None

    @property
    def is_bare(self) -> bool:
        """Returns whether the request has no parameters, no id and no trace, and says nothing of its scheduling."""
        return not (self.parameters or self.request_id or self.traceparent or self.scheduling != UNSCHEDULED)
