"""Requests made inside the worker, by a step of an ensemble or by a model; queues treat them like any other request.

Their inputs are arrays, on this device or in host memory, instead of places; their responses go to a sink instead of a lane.
Nothing is copied for either: the arrays of one model's answer are the inputs of the next request.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from tensord.shm.arrays import Array, as_strings
from tensord.shm.errors import ServingError
from tensord.workers.requests.request import Moments, Request, Sink
from tensord.workers.requests.result import Response, Result

if TYPE_CHECKING:
    pass


class InnerRequest(Request):
    """A request made inside the worker, with ``request_id`` and ``submitter`` of the client's request that it is made for."""

    __slots__ = ("_answered", "ahead", "may_stop", "origin", "sink")

    def made_for(self, sink: Sink, origin: Request | None) -> InnerRequest:
        """Sets who takes the responses (``sink``), and the request for whose sake this one is made; None: there is none."""
        self.sink: Sink = sink
        self.origin: Request | None = origin
        if self.timeline is not None and origin is not None and origin.timeline is not None:
            self.timeline.context = origin.timeline.context
        self._answered = False
        #: Its maker would have its model stop, and takes what that still sends.
        self.may_stop = False
        #: Of responses that were handed over and that its maker has not taken yet: what each counts.
        self.ahead: deque[int] = deque()
        return self

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled or self.may_stop

    @property
    def is_open(self) -> bool:
        return not self._answered

    def __repr__(self) -> str:
        return f"<InnerRequest of {self.request_id} for {self.prepared.model!r}, {self.rows} rows>"


def not_kept(request: Request | None) -> None:
    """Has no response cache keep the answer to a request, nor to those that it was made for: what they depend on is not known."""
    while request is not None:
        request.asked = None
        request = request.origin if isinstance(request, InnerRequest) else None


def hand_over(request: Request, result: Result | None, moments: Moments | None = None, final: bool = True) -> None:
    """Passes a response to the sink (the function that receives responses) of a request that was made inside the worker.

    Does nothing once the request had its last response. Bytes that are copied for the sink count for the request's version.

    Args:
      request: an ``InnerRequest`` (asserted).
      result: the response; None: only the mark that there is no further one.
      moments: when the run began, had its inputs, had computed, in ns; None: the request did not run.
      final: whether this is the last response.
    """
    assert isinstance(request, InnerRequest)
    if request.is_open:
        if result is not None and not isinstance(result, ServingError):
            result, copied = kept(result)
            request.version.statistics.copied_byte_size += copied
        request._answered = final
        request.sink(request, result, moments, final)


def kept(result: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """Converts a model's outputs to read-only inputs of other models, with strings as bytes.

    Arrays that XLA made are used where they are. Arrays that the model's own code made are copied, because that code may keep
    them and write to them again.

    Returns: the arrays, and how many bytes were copied.
    """
    copied = 0
    own: dict[str, Array] = Response({}, result.parameters) if isinstance(result, Response) else {}
    for name, array in result.items():
        if isinstance(array, np.ndarray) and (array.flags.writeable or array.dtype.kind in "SUO"):
            made = as_strings(array) if array.dtype.kind in "SUO" else np.array(array)
            made.flags.writeable = False
            copied += made.nbytes
            array = made
        own[name] = array
    return own, copied
