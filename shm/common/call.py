"""Defines ``Call``, a request to a model over any kind of connection, and checks the keyword arguments of requests."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from .errors import InvalidArgument
from .results import Array, Parameter
from .scheduling import (
    PARAMETERS,
    UNSCHEDULED,
    Arguments,
    Kind,
    Scheduling,
    SequenceId,
    checked_text,
    sampled,
    set_named,
)
from .tensors import array

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: The most requests that wait in this process for a worker, or for an HTTP connection, beyond those that are sent.
MAX_WAITING = 1 << 16
#: An empty mapping that nobody writes to.
NOTHING: dict[str, Any] = {}
#: Seconds (31 years) from which on a timeout is no limit.
FOREVER = 1e9


class Own(Arguments, total=False):
    """The keyword arguments that calls of a model take besides tensors, such as ``priority``."""

    #: The trace, and the span in it, that the request belongs to, as W3C Trace Context has them.
    traceparent: str


def read_arguments(
    own: Mapping[str, Any],
    scheduling: Scheduling = UNSCHEDULED,
    others: Mapping[str, Callable[[str, Any], Any]] = NOTHING,
) -> tuple[Scheduling, dict[str, Any]]:
    """Checks the keyword arguments of a request. Returns its scheduling fields, and a dict of its remaining arguments.

    The returned values have Python's own types. Arguments that are None are left out.

    Args:
      own: the arguments by name. Its dict "parameters" may also have scheduling fields by their HTTP names, such as "timeout".
      scheduling: gives the value of each scheduling field that ``own`` does not give.
      others: names that ``own`` may have in addition to ``Arguments``. Each maps to a function that returns the checked value.

    Raises: InvalidArgument: a value has the wrong type or is not allowed.  TypeError: ``own`` has a name that is not allowed.
    """
    said: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for name, value in own.items():
        check = _FIELDS.get(name)
        if check is None:
            check = _OTHERS.get(name) or others.get(name)
            if check is None:
                raise TypeError(f"a request to a model has no {name}")
            if value is not None:
                said[name] = check(name, value)
        elif value is not None:
            fields[name] = check(name, value)
    if "parameters" in said:
        parameters, name = set_named(said["parameters"])
        if name:
            fields["parameter_set"] = name
        # Over HTTP and gRPC the names of scheduling parameters mean the same, wherever a client has put them.
        for key in parameters.keys() & PARAMETERS.keys():
            row = PARAMETERS[key]
            fields.setdefault(row.field, _CHECKS[row.kind](f"parameter '{key}'", parameters.pop(key)))
        said["parameters"] = parameters
    return scheduling._replace(**fields) if fields else scheduling, said


def traced(name: str, value: Any) -> str:
    """Converts ``value``, a W3C ``traceparent``, to version 00. Returns "" if ``value`` is malformed or says "not sampled".

    Raises InvalidArgument if ``value`` is not a str. ``name`` is the argument's name in the error.
    """
    ids = sampled(text(name, value).strip())
    return "" if ids is None else "00-{}-{}-01".format(*ids)


def natural(name: str, value: Any) -> int:
    """Returns ``value`` if it is an unsigned integer of 64 bits, else raises InvalidArgument.

    ``name`` is the argument's name in errors.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, a whole number is expected") from None
    if not 0 <= number < 1 << 64:
        raise InvalidArgument(f"{name} is {reprlib.repr(number)}, at least 0 and less than 2**64 is expected")
    return number


def text(name: str, value: Any) -> str:
    """Returns ``value`` if it is a str, else raises InvalidArgument. ``name`` is the argument's name in errors."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, a text is expected")
    return str.__str__(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name} is {reprlib.repr(value)}, True or False is expected")
    return bool(value)


def _sequence_id(name: str, value: Any) -> SequenceId:
    if not isinstance(value, str):
        return natural(name, value)
    return checked_text(str.__str__(value), Kind.SEQUENCE_ID)


def plain_parameters(name: str, value: Any) -> dict[str, Parameter]:
    """Returns a request's parameters in Python's own types.

    Raises InvalidArgument if ``value`` is no mapping, a key is not a str, or a value is no bool, number or str, or an integer of
    more than 64 bits. ``name`` is what ``value`` is called in the error.
    """
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} are {reprlib.repr(value)}, a mapping of names to values is expected")
    return {text("the name of a parameter", key): _parameter(key, each) for key, each in value.items()}


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


def named(name: Any, version: Any) -> tuple[str, int]:
    """Returns a model's name and version. Raises InvalidArgument unless they are a str and an integer >= 0."""
    return text("a model's name", name), natural("a model's version", version)


def seconds(timeout: Any) -> float | None:
    """Returns a timeout in seconds. None and infinity become None, which means no limit.

    Raises InvalidArgument if the timeout is not a number.
    """
    if timeout is None:
        return None
    try:
        number = float(timeout)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(timeout, str) or math.isnan(number):
        raise InvalidArgument(f"timeout is {reprlib.repr(timeout)}, a number of seconds or None is expected")
    return number if number < FOREVER else None


_CHECKS: dict[Kind, Callable[[str, Any], Any]] = {
    Kind.NUMBER: natural,
    Kind.DURATION: natural,
    Kind.FLAG: _flag,
    Kind.TEXT: text,
    Kind.SEQUENCE_ID: _sequence_id,
}
_FIELDS = {row.field: _CHECKS[row.kind] for row in PARAMETERS.values() if row.kind in _CHECKS}
_OTHERS: dict[str, Callable[[str, Any], Any]] = {"parameters": plain_parameters, "request_id": text}


class Seldom(TypedDict, total=False):
    """Attributes of ``Call`` that most requests leave at their defaults."""

    places: Mapping[str, Array]
    parameters: Mapping[str, Parameter]
    request_id: str
    traceparent: str
    streams: bool
    detached: bool


class Call:
    """One request: the model, the input arrays and everything else that is sent with them."""

    # What is seldom read is an attribute of the class.
    #: True: any number of responses is expected; False: exactly one.
    streams = False
    #: True: the caller goes on before the answer has come, and may write to the input arrays meanwhile.
    detached = False
    #: True: it is sent many times.
    repeats = False
    #: Input name -> the caller's array, for each input that has to be copied anew each time that a call is sent.
    sources: Mapping[str, Any] = NOTHING
    #: The last request of a call that is sent many times, if its answer did not come at once.
    last: Any = None

    def __init__(
        self,
        model: str,
        inputs: dict[str, Array],
        version: int = 0,
        outputs: Sequence[str] = (),
        scheduling: Scheduling = UNSCHEDULED,
        deadline: float | None = None,
        pure: bool = False,
        **seldom: Unpack[Seldom],
    ) -> None:
        """Makes a request, but sends nothing.

        Args:
          inputs: C-contiguous arrays by name, in this host's byte order, of dtypes that the protocol has. Arrays of numpy kinds
            S, U and O (strings, objects) are BYTES.
          version: the model's version, or 0 for the newest.
          outputs: the names of the outputs to return, or none for all of them.
          scheduling: when the request is run, in which sequence, and with which parameter set.
          deadline: the time of ``time.monotonic()`` in seconds at which the caller stops waiting, or None for no deadline.
          pure: True if running the request twice does no harm. It may then be sent again after a failure.
          seldom: values of the attributes in ``Seldom``, such as ``request_id``.
        """
        self.model = model
        self.inputs = inputs
        self.version = version
        self.outputs = outputs
        self.scheduling = scheduling
        self.deadline = deadline
        self.pure = pure
        #: Output name -> the array that the output is written to.
        self.places: Mapping[str, Array] = NOTHING
        #: The request's parameters, for the model.
        self.parameters: Mapping[str, Parameter] = NOTHING
        #: An id that the server logs with the request; "": none.
        self.request_id = ""
        #: The trace that the request belongs to, and the span in it, in the form of W3C Trace Context; "": it belongs to none.
        self.traceparent = ""
        #: Where the inputs of a call that is sent many times lie, as its connection last placed them; None before the first.
        self.layout: Any = None
        for name, value in seldom.items():
            setattr(self, name, value)

    def copy_sources(self) -> None:
        """Copies the present values of the arrays in ``sources`` to the arrays in ``inputs``.

        Raises InvalidArgument if an array has got another shape.
        """
        for name, value in self.sources.items():
            made = array(name, value, None)
            if made.shape != self.inputs[name].shape:
                raise InvalidArgument(f"input '{name}' has another shape than when it was prepared")
            np.copyto(self.inputs[name], made)

    @property
    def is_bare(self) -> bool:
        """Returns whether the request has no parameters, no id, no trace, and no scheduling parameter, such as a priority."""
        return not (self.parameters or self.request_id or self.traceparent or self.scheduling != UNSCHEDULED)
