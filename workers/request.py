"""One request inside the worker: validated, with its tensors in reach, from the queue to its answer.

Made by ``workers.validation``, owned by the worker's loop; models only read it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from shm.arrays import Array
from shm.messages import RequestedOutput, Submit
from workers.scheduling.queue import Waiting
from workers.timeline import RequestTimeline

if TYPE_CHECKING:
    from workers.model_version import ModelVersion
    from workers.region_table import AnyRegion
    from workers.submitter import Submitter


class Request(Waiting):
    """``arrays`` are views of the submitter's arena or of a client's region wherever that is possible: nobody writes to them."""

    __slots__ = (
        "arrays",
        "cancelled",
        "copied_byte_size",
        "outputs",
        "regions",
        "submit",
        "submitter",
        "timeline",
        "version",
    )

    def __init__(
        self,
        version: ModelVersion,
        submitter: Submitter,
        submit: Submit,
        key: Hashable,
        rows: int,
        arrays: dict[str, Array],
        outputs: dict[str, RequestedOutput],
        regions: list[AnyRegion],
        now_ns: int,
        copied_byte_size: int = 0,
    ) -> None:
        super().__init__(key, rows, submit.received_ns or now_ns)
        self.version = version
        self.submitter = submitter
        self.submit = submit
        #: Input name -> array of the model's shape (after a configured reshape); of GPU memory
        #: and snapshot regions a ``LateTensor``.
        self.arrays = arrays
        #: What was asked for, by name; empty: everything.
        self.outputs = outputs
        #: Client regions in use until the completion, once per tensor.
        self.regions = regions
        #: Bytes of its tensors that were copied for it alone: before they are gathered, and when the outputs are placed.
        self.copied_byte_size = copied_byte_size
        #: The submitter no longer waits.
        self.cancelled = False
        self.deadline_ns = submit.deadline_ns
        self.timeout_ns = submit.timeout_us * 1000
        self.priority = submit.priority
        #: Of a sampled request.
        self.timeline = RequestTimeline(submit.trace, now_ns) if submit.trace else None

    @property
    def label(self) -> str:
        """How Triton's messages begin, so that a client finds its request."""
        return label(self.submit)

    def release(self) -> None:
        """Ends the use of regions. Idempotent."""
        for region in self.regions:
            region.unlease()
        self.regions = []

    def __repr__(self) -> str:
        return f"<Request {self.submit.request_id} for {self.submit.model!r}, {self.rows} rows>"


def label(submit: Submit) -> str:
    """``[request id: X] `` with the client's id."""
    return f"[request id: {submit.client_id or '<id_unknown>'}] "
