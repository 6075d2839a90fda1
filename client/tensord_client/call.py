"""One request, in the form in which every kind of connection accepts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Union

from tensord_client.results import Array, Parameter

SequenceId = Union[int, str]


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
        "version",
    )

    def __init__(
        self,
        model: str,
        inputs: Mapping[str, Array],
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
        self.deadline = deadline
        self.streams = streams
        self.pure = pure
        self.detached = detached
        #: Layouts that a connection keeps for a call that is sent many times; None: the call is sent once.
        self.layouts: dict[Any, Any] | None = None

    @property
    def is_bare(self) -> bool:
        """Returns whether the request has no parameters, id, priority, queue timeout, sequence, replace key or parameter set."""
        return not (
            self.parameters
            or self.request_id
            or self.priority
            or self.timeout_us
            or self.sequence_id
            or self.replace_key
            or self.parameter_set
        )
