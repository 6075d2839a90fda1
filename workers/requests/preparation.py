"""A prepared request as its worker knows it: what was found when the first one was validated, and what their answers look like.

It holds for one load of a model version. Where its model means another one by now, everything is found out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tensord.shm.messages import PreparedAnswer, PreparedRequest, RegionSlice, RequestedOutput
from tensord.shm.prepared import Numbered
from tensord.workers.requests.familiar import Familiar, Known
from tensord.workers.tensors.batch_outputs import OutputLayout

_MAX_PLANS = 64


class Part(NamedTuple):
    """Where an output is in what a run made, and where it goes. Row n begins at ``start + n * step``."""

    #: Which of the run's contents.
    content: int
    start: int
    step: int
    byte_size: int
    #: None: into the record.
    region: RegionSlice | None


class AnswerPlan(NamedTuple):
    """An answer but for its bytes."""

    numbered: Numbered[PreparedAnswer]
    #: In the order of the answer's outputs.
    parts: list[Part]
    #: Of all parts together, for one row.
    row_byte_size: int
    #: Whether all of them go into the record.
    inside: bool


class Preparation:
    """Belongs to one submitter and one number."""

    __slots__ = ("familiar", "known", "large", "names", "number", "outputs", "plans", "prepared", "sizes")

    def __init__(self, number: int, prepared: PreparedRequest) -> None:
        self.number = number
        self.prepared = prepared
        own = [tensor.region is None for tensor in prepared.inputs]
        #: The names of its inputs, if none of them lies in a region.
        self.names = tuple([tensor.name for tensor in prepared.inputs]) if own and all(own) else None
        #: Stands for the load whose requests they are, without keeping the model; None: none was validated so far.
        self.familiar: Familiar | None = None
        #: What they come to; None: they must be looked at each time.
        self.known: Known | None = None
        #: The byte sizes of its inputs.
        self.sizes: list[int] = []
        #: What they ask for, by name; None: that names regions, which must be looked at each time.
        self.outputs: Mapping[str, RequestedOutput] | None = None
        #: By how a run's outputs lie: what becomes of them.
        self.plans: dict[OutputLayout, AnswerPlan] = {}
        #: The number of the last answer with large outputs.
        self.large: Numbered[PreparedAnswer] | None = None

    def learn(self, familiar: Familiar, known: Known | None, outputs: Mapping[str, RequestedOutput]) -> None:
        """One of them was found right."""
        self.familiar, self.known = familiar, known
        self.sizes = [byte_size for _, byte_size in known.tensors] if known is not None else []
        self.outputs = outputs if all(output.region is None for output in outputs.values()) else None
        self.plans = {}
        self.large = None

    def plan(self, layout: OutputLayout, plan: AnswerPlan) -> None:
        """Remembers how answers cut from such outputs are made. There are as many as programs that ran them."""
        if len(self.plans) >= _MAX_PLANS:
            self.plans.clear()
        self.plans[layout] = plan

    def __repr__(self) -> str:
        return f"<Preparation for {self.prepared.model!r}, {len(self.plans)} plans>"
