"""Decides for one request to an ensemble which steps run next, what its answers are, and when the request has ended.

This module does no I/O, and the tensors may be objects of any type. ``begun`` and ``responded`` return what the caller must do
now: run a step (``StepStart``), or send an answer to the client (a dict: requested output -> tensor). The request has ended
when no step runs and all responses of the steps were given to ``responded``. ``stuck`` is then True if an answer could not be
completed.

If the client leaves out an optional input, or a model does not make an output, steps and answers do without this tensor.

A step belongs to the sequence of the client's request. But if a model sets a correlation id in a response, every step that
depends on this response belongs to the sequence with this id.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, NamedTuple, TypeVar

from tensord.workers.scheduling.ensemble_graph import EnsembleGraph, NeededSteps
from tensord.workers.scheduling.sequence import Controls

T = TypeVar("T")


class StepStart(NamedTuple, Generic[T]):
    """The decision that a step of an ensemble is to run now, with the step's inputs."""

    step: int
    #: Number of the origin's answer that the step runs for.
    iteration: int
    #: Input of the model -> tensor.
    inputs: dict[str, T]
    #: Sequence controls of the step's request; None: those of the client's request.
    controls: Controls | None = None


class EnsembleRun(Generic[T]):
    """The state of one request to an ensemble. ``running`` counts the steps that run."""

    __slots__ = ("_answered", "_controls", "_counts", "_graph", "_left", "_needed", "_open", "_values", "running")

    def __init__(self, graph: EnsembleGraph, needed: NeededSteps) -> None:
        self._graph = graph
        self._needed = needed
        #: (ensemble tensor, iteration) -> its value; None: it was left out. Without an origin the iteration is 0.
        self._values: dict[tuple[str, int], T | None] = {}
        #: (ensemble tensor, iteration) -> uses that are still to come.
        self._left: dict[tuple[str, int], int] = {}
        #: (ensemble tensor, iteration) -> its sequence, where that is not the client's.
        self._controls: dict[tuple[str, int], Controls] = {}
        #: (origin, iteration) -> how many steps run for it.
        self._open: dict[tuple[int, int], int] = {}
        #: Streaming step -> its responses so far.
        self._counts: dict[int, int] = {}
        #: Iterations that were answered: all below this one.
        self._answered = 0
        self.running = 0

    def begun(self, tensors: Mapping[str, T]) -> list[StepStart[T] | dict[str, T]]:
        """Starts the run with the client's inputs, by name. Returns the steps to run now, and answers that are complete."""
        self._keep({name: tensors.get(name) for name in self._graph.inputs}, 0)
        out: list[StepStart[T] | dict[str, T]] = [
            start for number in self._needed.numbers if (start := self._start(number, 0)) is not None
        ]
        return out + self._answers()

    def responded(
        self, start: StepStart[T], outputs: Mapping[str, T], controls: Controls | None = None
    ) -> list[StepStart[T] | dict[str, T]]:
        """Stores the outputs of one response of a started step. Returns the steps to run now, and answers that are complete.

        ``outputs``: the tensors by the names that the step's model gives them. ``controls``: the correlation id and the flags
        START and END that the step's model sets for the steps that take ``outputs``; None: those of ``start`` apply.
        """
        number, step = start.step, self._graph.steps[start.step]
        iteration = start.iteration
        if step.streams:
            iteration = self._counts.get(number, 0)
            self._counts[number] = iteration + 1
        controls = controls or start.controls
        self._keep({tensor: outputs.get(name) for name, tensor in step.outputs.items()}, iteration, controls)
        # A tensor comes once, so what it was the last one for starts now, and never again.
        ready = {
            (taker, due): None
            for tensor in step.outputs.values()
            for taker in self._needed.takers.get(tensor, ())
            for due in self._due(taker, tensor, iteration)
        }
        out: list[StepStart[T] | dict[str, T]] = [at for each in ready if (at := self._start(*each)) is not None]
        return out + self._answers()

    def ended(self, start: StepStart[T]) -> None:
        """Counts a started step as ended: it has given its last response or has failed. Call it once for each start."""
        self.running -= 1
        key = (self._needed.origins[start.step], start.iteration)
        if key[0] is not None:
            self._open[key] -= 1  # type: ignore[index]
            if not self._open[key]:  # type: ignore[index]
                del self._open[key]  # type: ignore[arg-type]

    def worked_on(self, step: int) -> int:
        """Returns how many responses of the streaming step ``step`` the ensemble's later steps have not fully processed."""
        held = {at for tensor, at in self._values if self._graph.origin.get(tensor) == step}
        return len(held | {at for origin, at in self._open if origin == step})

    def full(self, step: int) -> bool:
        """Returns whether the streaming step ``step`` must pause, because later steps still need too many of its responses."""
        return bool(self._graph.most) and self.worked_on(step) >= self._graph.most

    @property
    def stuck(self) -> bool:
        """Returns whether the client lacks outputs that no step will make any more. Call this method only while no step runs."""
        if not any(map(self._dynamic, self._needed.outputs)):
            return not self._answered
        # Of an iteration that has begun everything is there, or was when it was answered.
        return any(tensor in self._needed.outputs for tensor, _ in self._values if self._dynamic(tensor))

    # -------------------------------------------------------------------------------------------------------- tensors

    def _keep(self, tensors: Mapping[str, T | None], iteration: int, controls: Controls | None = None) -> None:
        for tensor, value in tensors.items():
            uses = self._needed.uses.get(tensor)
            if uses:
                self._values[tensor, iteration] = value
                self._left[tensor, iteration] = uses
                if controls is not None:
                    self._controls[tensor, iteration] = controls

    def _look(self, tensor: str, iteration: int, again: bool) -> T | None:
        key = (tensor, iteration) if self._dynamic(tensor) else (tensor, 0)
        value = self._values[key]
        # If the step runs for each response (``again``), a value that depends on no streaming step is kept.
        if self._dynamic(tensor) or not again:
            self._left[key] -= 1
            if not self._left[key]:
                del self._values[key], self._left[key]
                self._controls.pop(key, None)
        return value

    def _dynamic(self, tensor: str) -> bool:
        return tensor in self._graph.origin

    def _there(self, tensor: str, iteration: int) -> bool:
        return (tensor, iteration if self._dynamic(tensor) else 0) in self._values

    # ---------------------------------------------------------------------------------------------------------- steps

    def _due(self, number: int, tensor: str, iteration: int) -> list[int]:
        if self._needed.origins[number] is None:
            return [0]
        if self._dynamic(tensor):
            return [iteration]
        mine = {name for name in self._graph.steps[number].inputs.values() if self._dynamic(name)}
        return sorted({at for name, at in self._values if name in mine})

    def _start(self, number: int, iteration: int) -> StepStart[T] | None:
        step = self._graph.steps[number]
        if not all(self._there(tensor, iteration) for tensor in step.inputs.values()):
            return None
        self.running += 1
        origin = self._needed.origins[number]
        if origin is not None:
            self._open[origin, iteration] = self._open.get((origin, iteration), 0) + 1
        again = origin is not None
        controls = self._controls_of(step.inputs.values(), iteration) if self._controls else None
        found = {tensor: self._look(tensor, iteration, again) for tensor in dict.fromkeys(step.inputs.values())}
        inputs = {name: value for name, tensor in step.inputs.items() if (value := found[tensor]) is not None}
        return StepStart(number, iteration, inputs, controls)

    def _controls_of(self, tensors: Collection[str], iteration: int) -> Controls | None:
        keys = ((tensor, iteration if self._dynamic(tensor) else 0) for tensor in tensors)
        return next((self._controls[key] for key in keys if key in self._controls), None)

    def _answers(self) -> list[StepStart[T] | dict[str, T]]:
        out: list[StepStart[T] | dict[str, T]] = []
        dynamic = any(self._dynamic(name) for name in self._needed.outputs)
        while (dynamic or not self._answered) and all(
            self._there(name, self._answered) for name in self._needed.outputs
        ):
            found = {name: self._look(name, self._answered, dynamic) for name in self._needed.outputs}
            out.append({name: value for name, value in found.items() if value is not None})
            self._answered += 1
        return out

    def __repr__(self) -> str:
        return f"<EnsembleRun {self.running} running, {len(self._values)} tensors held>"
