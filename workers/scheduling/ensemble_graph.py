"""Describes the steps of a loaded ensemble, and the tensors that flow between them.

    request ─▶ ensemble tensors ─▶ step: a request to another model ─▶ ensemble tensors ─▶ ... ─▶ answer

A streaming step may give any number of answers to one request. It is the *origin* of the tensors in its answers, and of all
tensors that are computed from its answers. A tensor with an origin can have one value for each answer of the origin. A tensor
without an origin has only one value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

#: Sets of requested outputs whose needed steps are cached.
_LIMIT = 64


class EnsembleStep(NamedTuple):
    """One step of an ensemble: the model that it asks, and the ensemble's tensors that are the model's inputs and outputs."""

    model: str
    #: 0: the newest.
    version: int
    #: Input of the model -> ensemble tensor.
    inputs: Mapping[str, str]
    #: Output of the model -> ensemble tensor.
    outputs: Mapping[str, str]
    #: True if a request to it may have any number of answers.
    streams: bool = False


class EnsembleGraph:
    """The steps of an ensemble, and the step or input that each tensor comes from.

    The caller has checked that only one step makes each tensor, and that each tensor depends on at most one streaming step.
    """

    def __init__(
        self, inputs: Collection[str], outputs: Collection[str], steps: Sequence[EnsembleStep], most: int = 0
    ) -> None:
        """Stores the graph.

        ``inputs``, ``outputs``: names of the ensemble's tensors. ``most``: for each streaming step, the most responses that
        later steps may work on at a time; 0: any number.
        """
        self.inputs = tuple(inputs)
        self.steps = tuple(steps)
        self.most = most
        #: Ensemble tensor -> its origin; those without one are not in it.
        self.origin: dict[str, int] = {}
        for number in self.in_order():
            step = steps[number]
            found = number if step.streams else self.origin_of(number)
            if found is not None:
                self.origin.update(dict.fromkeys(step.outputs.values(), found))
        #: Outputs that answers may hold, in the order in which they are made.
        made = [tensor for number in self.in_order() for tensor in steps[number].outputs.values()]
        self.outputs = tuple([tensor for tensor in (*inputs, *made) if tensor in outputs])
        self._needed: dict[frozenset[str], NeededSteps] = {}

    def origin_of(self, number: int) -> int | None:
        """Returns the streaming step that step ``number`` needs, directly or through others; None: it needs none."""
        found = (self.origin[tensor] for tensor in self.steps[number].inputs.values() if tensor in self.origin)
        return next(found, None)

    def needed(self, outputs: Collection[str]) -> NeededSteps:
        """Returns the steps that must run to compute ``outputs``, or all outputs of the ensemble if ``outputs`` is empty."""
        wanted = frozenset(outputs or self.outputs)
        found = self._needed.get(wanted)
        if found is None:
            if len(self._needed) >= _LIMIT:
                self._needed.clear()
            found = self._needed[wanted] = NeededSteps(self, wanted)
        return found

    def in_order(self) -> list[int]:
        """Returns the numbers of the steps in topological order. Each step comes after the steps whose outputs it takes."""
        there, waiting, ordered = set(self.inputs), dict(enumerate(self.steps)), list[int]()
        while ready := [number for number, step in waiting.items() if there.issuperset(step.inputs.values())]:
            ordered += ready
            for number in ready:
                there.update(waiting.pop(number).outputs.values())
        return ordered

    def __repr__(self) -> str:
        return f"<EnsembleGraph {' '.join(step.model for step in self.steps)}>"


class NeededSteps:
    """The steps of an ensemble that have to run to compute certain outputs."""

    def __init__(self, graph: EnsembleGraph, wanted: frozenset[str]) -> None:
        written = {tensor: number for number, step in enumerate(graph.steps) for tensor in step.outputs.values()}
        numbers: set[int] = set()
        looked: set[str] = set()
        to_look = list(wanted)
        while to_look:
            tensor = to_look.pop()
            number = written.get(tensor)
            if tensor in looked:
                continue
            looked.add(tensor)
            if number is not None and number not in numbers:
                numbers.add(number)
                to_look += graph.steps[number].inputs.values()
        self.numbers = tuple(sorted(numbers))
        #: Wanted outputs, in the order in which they are made.
        self.outputs = tuple([name for name in graph.outputs if name in wanted])
        #: Ensemble tensor -> the steps that take it.
        self.takers: dict[str, list[int]] = {tensor: [] for tensor in looked}
        for number in self.numbers:
            for tensor in dict.fromkeys(graph.steps[number].inputs.values()):
                self.takers[tensor].append(number)
        #: How often each tensor is looked at, before it may be forgotten: by its takers, and by the answer.
        self.uses = {tensor: len(takers) + (tensor in wanted) for tensor, takers in self.takers.items()}
        self.origins = {number: graph.origin_of(number) for number in self.numbers}
