"""A request made inside the worker, by a step of an ensemble or by a model; queues treat it like any other.

Its inputs are arrays, of this device or of the host, and not places; what becomes of it goes to a sink, and not to a lane.
Nothing is copied for either: the arrays of one model's answer are the inputs of the next request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tensord.shm.arrays import Array, strings
from tensord.shm.messages import PreparedRequest, RequestedOutput, RequestRecord
from tensord.workers.requests.request import Moments, Request, Sink
from tensord.workers.requests.result import Response, Result
from tensord.workers.requests.submitter_link import SubmitterLink

if TYPE_CHECKING:
    from tensord.workers.models.model_version import ModelVersion

_ALL: Mapping[str, RequestedOutput] = {}


class InnerRequest(Request):
    """A request with the ``request_id`` and ``submitter`` of the client's request that it is made for."""

    __slots__ = ("_answered", "ahead", "may_stop", "origin", "sink")

    def __init__(
        self,
        version: ModelVersion,
        submitter: SubmitterLink[Request],
        prepared: PreparedRequest,
        own: RequestRecord,
        key: Hashable,
        rows: int,
        arrays: dict[str, Array],
        outputs: Collection[str],
        now_ns: int,
        sink: Sink,
        origin: Request | None = None,
    ) -> None:
        """``outputs``: names of the wanted outputs; none: all."""
        wanted = {name: RequestedOutput(name) for name in outputs} if outputs else _ALL
        super().__init__(version, submitter, prepared, own, key, rows, arrays, wanted, [], now_ns)
        self.sink: Sink = sink
        #: The request that it is made for, where there is one.
        self.origin: Request | None = origin
        if self.timeline is not None and origin is not None and origin.timeline is not None:
            self.timeline.context = origin.timeline.context
        self._answered = False
        #: Its maker would have its model stop, and takes what that still sends.
        self.may_stop = False
        #: Of responses that were handed over and that its maker has not taken yet: what each counts.
        self.ahead: deque[int] = deque()

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled or self.may_stop

    @property
    def is_open(self) -> bool:
        return not self._answered

    def __repr__(self) -> str:
        return f"<InnerRequest of {self.request_id} for {self.prepared.model!r}, {self.rows} rows>"


def hand_over(request: Request, result: Result | None, moments: Moments | None = None, final: bool = True) -> None:
    """Answers a request that has a sink. After the last answer nothing is handed over any more."""
    assert isinstance(request, InnerRequest)
    if request.is_open:
        request._answered = final
        request.sink(request, result, moments, final)


def kept(result: dict[str, Array]) -> tuple[dict[str, Array], int]:
    """Returns a model's outputs as read-only inputs of others, with strings as bytes; and how many bytes were copied.

    What XLA made is used where it is. What a model's own code made it may keep, and write to again.
    """
    copied = 0
    own: dict[str, Array] = Response({}, result.parameters) if isinstance(result, Response) else {}
    for name, array in result.items():
        if isinstance(array, np.ndarray) and (array.flags.writeable or array.dtype.kind in "SUO"):
            made = strings(array) if array.dtype.kind in "SUO" else np.array(array)
            made.flags.writeable = False
            copied += made.nbytes
            array = made
        own[name] = array
    return own, copied
