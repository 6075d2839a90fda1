"""One request as it is handed to a connection, whichever way it goes to the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, Union

from tensord_client.results import Array, Parameter

SequenceId = Union[int, str]


class Own(TypedDict, total=False):
    """Keyword arguments of a request besides its tensors."""

    parameters: Mapping[str, Parameter]
    request_id: str
    priority: int
    timeout_us: int
    sequence_id: SequenceId
    sequence_start: bool
    sequence_end: bool
    replace_key: str


class Call:
    """A request.

    ``inputs`` are C-contiguous arrays. Those of a connection's ``empty`` are used where they lie, any others are copied, or sent
    at once. Arrays of kinds S, U and O are BYTES. ``places`` are arrays that outputs are written to.
    """

    __slots__ = (
        "deadline",
        "inputs",
        "model",
        "outputs",
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
        deadline: float | None = None,
        streams: bool = False,
        pure: bool = False,
    ) -> None:
        """Takes what the request says.

        Args:
          version: 0 is the newest.
          outputs: which are wanted; none: all.
          timeout_us: how long it may wait in the model's queue; 0: as long as its policy says.
          sequence_id: 0 or "": it belongs to no sequence.
          replace_key: while it waits the next request of that key takes its place (Replaced); "": none.
          deadline: seconds of ``time.monotonic()``, after which nobody waits; None: never.
          streams: any number of responses is expected.
          pure: running it twice harms nobody.
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
        self.deadline = deadline
        self.streams = streams
        self.pure = pure

    @property
    def is_bare(self) -> bool:
        """Returns whether its tensors are all that it says."""
        return not (
            self.parameters
            or self.request_id
            or self.priority
            or self.timeout_us
            or self.sequence_id
            or self.replace_key
        )
