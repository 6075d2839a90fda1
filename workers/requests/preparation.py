"""Keeps what a worker has found out about requests that repeat: checked inputs of a load, and prepared requests with plans."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tensord.shm.messages import PreparedAnswer, PreparedRequest, RequestedOutput
from tensord.shm.prepared import Numbered
from tensord.workers.requests.answer_plan import AnswerPlan
from tensord.workers.tensors.output_layout import OutputLayout

#: Kinds of inputs remembered for one load, and plans for one number.
_MAX_CHECKED = 256
_MAX_PLANS = 64
#: In place of a number.
INLINE = -1

#: (name, datatype, shape) of each input, in the order of the request.
Inputs = tuple[tuple[str, str, tuple[int, ...]], ...]


class Checked(NamedTuple):
    """The result of checking inputs of certain names, datatypes and shapes for one load (one loading) of a model version."""

    #: What requests must have in common to run together.
    key: Hashable
    rows: int
    #: Whether the bytes of all of them are the arrays as the model takes them; then their dtypes and sizes are here.
    plain: bool
    dtypes: list[np.dtype[Any]]
    sizes: list[int]


class CheckedInputs(dict[Inputs, Checked]):
    """A bounded cache of inputs that were checked for one load (one loading) of a model version.

    Other code compares the object's identity to learn whether a result holds for this load. Belongs to the worker's loop.
    """

    __slots__ = ()

    def learn(self, inputs: Inputs, checked: Checked) -> None:
        """Stores the result of checking inputs that were found valid. Clears the cache first if it is full."""
        if len(self) >= _MAX_CHECKED:
            self.clear()
        self[inputs] = checked


class Preparation:
    """A prepared request of one submitter, with the results of validating it.

    It also has the plans of its answers. Results and plans hold for one load (one loading) of a model version: after another load
    they are made anew.
    """

    __slots__ = ("checked", "large", "load", "number", "outputs", "own", "plans", "prepared")

    def __init__(self, prepared: PreparedRequest, number: int = INLINE) -> None:
        """
        Args:
          number: the number by which the lane names the prepared request; ``INLINE``: the prepared request came inside one
            request, and no other request uses it.
        """
        self.number = number
        self.prepared = prepared
        #: Whether all of its tensors are each request's own, and none lies in a region.
        self.own = not [tensor for tensor in prepared.inputs if tensor.region is not None]
        #: Stands for the load whose requests they are, without keeping the model; None: none was validated so far.
        self.load: CheckedInputs | None = None
        #: What they come to; None: each has another shape.
        self.checked: Checked | None = None
        #: What they ask for, by name; None: that names regions, which must be looked at each time.
        self.outputs: Mapping[str, RequestedOutput] | None = None
        #: By how a run's outputs lie: what becomes of them.
        self.plans: dict[OutputLayout, AnswerPlan] = {}
        #: The number of the last answer with large outputs.
        self.large: Numbered[PreparedAnswer] | None = None

    def learn(self, load: CheckedInputs, checked: Checked | None, outputs: Mapping[str, RequestedOutput]) -> None:
        """Stores the results of validating a request that uses this preparation, for later ones, and drops the answer plans.

        Args:
          load: the load (one loading) of the model version that the results hold for.
          checked: the result of checking the inputs; None: shapes differ from request to request.
          outputs: the requested outputs by name.
        """
        self.load, self.checked = load, checked
        self.outputs = outputs if not any(output.region is not None for output in outputs.values()) else None
        self.plans = {}
        self.large = None

    def plan(self, layout: OutputLayout, plan: AnswerPlan) -> None:
        """Stores how answers are made from a run's outputs with this layout (compared by identity).

        Clears the stored plans first if there are too many.
        """
        if len(self.plans) >= _MAX_PLANS:
            self.plans.clear()
        self.plans[layout] = plan

    def __repr__(self) -> str:
        return f"<Preparation for {self.prepared.model!r}, {len(self.plans)} plans>"
