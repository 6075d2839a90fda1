"""A lane is this process's own connection to a worker of the daemon, with memory that both of them see.

This is the edition that others build on: signatures as they will be.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Generator, Iterator, Mapping, Optional, Sequence, Union

import numpy as np

from tensord_client.results import Answer, Parameter, Timing


class Description:
    """A model as the daemon describes it when a client opens it."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.model: str = answer["model"]
        #: The version that was asked for, or the newest ready one.
        self.version: int = answer["version"]
        #: V2 metadata of that version: name, versions, platform, inputs, outputs.
        self.metadata: Dict[str, Any] = answer["metadata"]
        #: 0: the model has no batch dimension.
        self.max_batch_size: int = answer["max_batch_size"]
        #: Whether a request has several responses.
        self.streams: bool = answer["streams"]
        #: Whether requests belong to sequences.
        self.sequences: bool = answer["sequences"]
        #: Whether running a request twice harms nobody.
        self.pure: bool = answer["pure"]
        #: in_flight, segments, segment_byte_size, response_byte_size.
        self.limits: Dict[str, int] = answer["limits"]


class Call:
    """One request.

    ``inputs`` are C-contiguous arrays or any others, which are copied; those from ``LaneConnection.empty`` are used where they lie.
    Arrays of kinds S, U and O are BYTES. ``places`` are arrays from ``empty`` that outputs are written to.
    """

    __slots__ = (
        "deadline",
        "inputs",
        "model",
        "outputs",
        "parameters",
        "places",
        "priority",
        "request_id",
        "sequence_end",
        "sequence_id",
        "sequence_start",
        "timeout_us",
        "version",
    )

    def __init__(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        *,
        version: int = 0,
        outputs: Sequence[str] = (),
        places: Optional[Mapping[str, np.ndarray]] = None,
        parameters: Optional[Mapping[str, Parameter]] = None,
        request_id: str = "",
        priority: int = 0,
        timeout_us: int = 0,
        sequence_id: Union[int, str] = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        deadline: Optional[float] = None,
    ) -> None:
        """Takes ``deadline`` in seconds of ``time.monotonic()``, after which nobody waits; None: never. ``version`` 0: the newest."""
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
        self.deadline = deadline


class Pending:
    """A request that was sent, whose answer, or answers, are to come. ``await`` gives the answer as well, on a running loop."""

    def result(self, timeout: Optional[float] = None) -> Answer:
        """Waits for the answer, for at most so many seconds.

        Raises: ServingError.  DeadlineExceeded: no answer came in that time; the request is cancelled.
        """
        raise NotImplementedError

    def responses(self, timeout: Optional[float] = None) -> Iterator[Answer]:
        """Iterates over the responses as they come, waiting for each at most so long; stopping early cancels the request."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Tells the worker that nobody waits any more. The result is then Cancelled."""
        raise NotImplementedError

    def done(self) -> bool:
        """Returns whether the last answer has come."""
        raise NotImplementedError

    def add_done_callback(self, callback: Callable[[Pending], object]) -> None:
        """Calls ``callback`` with this once it is done: from a thread of the connection's, or at once if it is done already."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, Answer]:
        """Waits on the running loop. Cancelling the task cancels the request."""
        raise NotImplementedError

    def async_responses(self) -> Any:
        """Returns an asynchronous iterator over the responses; ``aclose`` cancels the request."""
        raise NotImplementedError


class PreparedCall:
    """A request whose record is made once. Calling it sends it with what its input arrays hold then.

    ``outputs`` of ``places`` are the same arrays each time; others are in memory that the next call does not touch.
    """

    #: Of the last call; None: the server did not say.
    timing: Optional[Timing]

    def __call__(self, timeout: Optional[float] = None) -> Mapping[str, np.ndarray]:
        """Sends, waits and returns the outputs by name. Raises as ``Pending.result``."""
        raise NotImplementedError


class LaneConnection:
    """The connection of this process to a daemon on the same host. Thread-safe.

    After a fork the child connects anew by itself; arrays of ``empty`` from before belong to the parent.
    """

    def __init__(self, path: str, max_results: int = 64, timeout: float = 10.0) -> None:
        """Connects to ``clients.sock`` at that path. ``timeout``: seconds to wait for each answer on that socket.

        Raises: Unavailable: nobody serves there.
        """
        #: What the daemon said of itself: server, version, wire, lanes, http.
        self.hello: Dict[str, Any] = {}
        #: Whether the daemon gives lanes and speaks this wire; otherwise requests go over ``hello["http"]``.
        self.lanes = False

    def open(self, model: str, version: int = 0, timeout: Optional[float] = None) -> Description:
        """Returns the description of a model, asked once and again when its lanes have ended.

        Raises: NotFound, Unavailable, Unsupported: as the daemon says.
        """
        raise NotImplementedError

    def empty(self, shape: Union[int, Sequence[int]], dtype: Any) -> np.ndarray:
        """Returns an array in memory that workers see, 64-byte aligned; its room is given back when it is collected.

        Raises: InvalidArgument: beyond what the daemon allows a client, with both numbers.
        """
        raise NotImplementedError

    def ask(self, call: Call) -> Pending:
        """Sends a request. Raises InvalidArgument: it cannot be sent.  ResultsHeld, Unavailable, NotFound."""
        raise NotImplementedError

    def prepare(self, call: Call) -> PreparedCall:
        """Makes a request that can be sent many times. Raises as ``ask``."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the connection and its lanes; what is in flight gets Cancelled. Arrays stay. Idempotent."""
        raise NotImplementedError
