"""Answers requests to an ensemble by running the compiled programs of its steps one after the other, as a pipeline.

The results are as if each step ran as a request to its model. A pipeline is used only while no request waits in the queue of
any of these models. Each of these models must be compiled for fixed shapes, and must not delay requests to fill a batch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tensord.shm.errors import NotFound
from tensord.shm.messages import TELLING_PARAMETER
from tensord.workers.models.execution import Execution
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.statistics import NativeRuns
from tensord.workers.programs.executable import Executable
from tensord.workers.programs.pipeline_program import Link, PipelineProgram
from tensord.workers.requests.request import Request
from tensord.workers.scheduling.ensemble_graph import EnsembleGraph, NeededSteps
from tensord.workers.tensors.buckets import Shapes
from tensord.workers.tensors.output_layout import layout_of, uncut
from tensord.workers.tensors.request_tensors import by_rows

#: Sets of outputs whose pipelines are cached, of all ensembles together.
_LIMIT = 256


class _Step(NamedTuple):
    version: ModelVersion
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


class EnsemblePipeline:
    """Computes a fixed set of an ensemble's outputs by running its steps' programs in turn. Only the worker's loop may use it."""

    #: Requests share batches, and no calls besides.
    grouped = None

    def __init__(self, version: ModelVersion, graph: EnsembleGraph, needed: NeededSteps, models: ModelTable) -> None:
        self._signature = version.signature
        #: Outputs that it makes.
        self._outputs = needed.outputs
        steps = [graph.steps[number] for number in graph.in_order() if number in needed.numbers]
        self._steps = [_Step(models.find(step.model, step.version), step.inputs, step.outputs) for step in steps]
        #: The programs by the number of rows that wait.
        self._by_rows: dict[int, PipelineProgram | None] = {}
        #: The programs by bucket.
        self._made: dict[int, PipelineProgram] = {}

    @property
    def free(self) -> bool:
        """True if no request waits in the queue of any model that the pipeline runs."""
        return not any(len(step.version.planner) for step in self._steps)

    def answers(self, request: Request) -> bool:
        """Returns whether the pipeline computes exactly the outputs that the request asks for."""
        return len(request.outputs or self._signature.outputs) == len(self._outputs)

    def program(self, rows: int) -> PipelineProgram | None:
        """Returns the program for a batch of ``rows`` rows; None: the steps have to run as requests to their models."""
        if rows not in self._by_rows:
            self._by_rows[rows] = self._build(rows)
        found = self._by_rows[rows]
        return None if found is None or found.long or not found.gathers else found

    def programs(self, key: Shapes, most: int) -> list[PipelineProgram | None]:
        """Lists the programs for 1, 2, ... ``most`` rows. An item is None if there is no program. ``key`` is not used."""
        return [self.program(rows) for rows in range(1, most + 1)]

    def run(self, execution: Execution, program: PipelineProgram) -> None:
        """Runs ``program`` for the requests in ``execution``, which gets the outputs. Raises the errors of the program."""
        requests = execution.requests
        arguments, execution.copied_byte_size = program.gather(requests)
        execution.gathered_ns = time.monotonic_ns()
        made = program.compute(arguments)
        contents = program.contents_of(made)
        execution.computed_ns = time.monotonic_ns()
        found = {
            name: np.frombuffer(content, np.dtype(array.dtype)).reshape(array.shape)
            if isinstance(content, bytes)
            else content
            for name, array, content in zip(self._outputs, made, contents, strict=True)
        }
        if program.layout is None:
            program.layout = layout_of(self._signature, found, self._signature.batches)
        execution.outputs = uncut(program.layout, contents)
        execution.cut = lambda: [*by_rows(found, requests)] if self._signature.batches else [found]

    def count(self, execution: Execution) -> None:
        """Adds the requests of ``execution``, one run of the pipeline, to the statistics of each step's model."""
        rows = sum([request.rows for request in execution.requests])
        took, count = execution.computed_ns - execution.gathered_ns, len(execution.requests)
        batch = (rows, 1, 0, took, 0)
        self.credit(NativeRuns(count, rows, 1, 0, 0, 0, (0, count * took, 0), [batch]))

    def credit(self, done: NativeRuns) -> None:
        """Adds ``done``, counts of answered requests, to the statistics of each step's model, with only that model's time."""
        shares = [0] * len(self._steps)
        for program in self._made.values():
            for number, ns in enumerate(program.call_ns):
                shares[number] += ns
            program.call_ns = [0] * len(shares)
        whole = max(1, sum(shares))
        for step, share in zip(self._steps, shares, strict=True):
            step.version.statistics.add(done.part(share, whole))

    def _build(self, rows: int) -> PipelineProgram | None:
        if any(-1 in spec.dims for spec in self._signature.inputs.values()):
            return None
        bucket, found = rows, list[Executable]()
        while len(found) < len(self._steps):
            executable = _program(self._steps[len(found)], self._signature.batches, bucket)
            if executable is None:
                return None
            if executable.rows > bucket:
                # The ones before it have to take as many.
                bucket, found = executable.rows, []
            else:
                found.append(executable)
        if bucket not in self._made:
            self._made[bucket] = self._pipelined(found, bucket)
        return self._made[bucket]

    def _pipelined(self, executables: Sequence[Executable], rows: int) -> PipelineProgram:
        #: Tensor -> where it is made; None: it is the client's.
        made_on = dict.fromkeys(self._signature.inputs)
        links: list[Link] = []
        for step, executable in zip(self._steps, executables, strict=True):
            here = executable.placement.device
            inputs = [
                (name, tensor, tensor not in self._signature.inputs and made_on[tensor] is not here)
                for name, tensor in step.inputs.items()
            ]
            made_on.update(dict.fromkeys(step.outputs.values(), here))
            links.append(Link(executable, tuple(inputs), tuple(step.outputs.items())))
        doubles = any(step.version.signature.wide for step in self._steps)
        whole = dataclasses.replace(self._signature, doubles=doubles)
        return PipelineProgram(whole, links, self._outputs, rows, executables[0].device)

    def __repr__(self) -> str:
        return f"<EnsemblePipeline {' '.join(step.version.name for step in self._steps)}>"


class EnsemblePipelines:
    """Finds and caches pipelines for all ensembles of a worker. A pipeline runs the programs of an ensemble's steps in turn."""

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._changes = models.changes
        #: The pipelines by version, and by the outputs that are wanted.
        self._known: dict[tuple[ModelVersion, tuple[str, ...]], EnsemblePipeline] = {}

    def find(
        self, version: ModelVersion, graph: EnsembleGraph, requests: Sequence[Request]
    ) -> tuple[EnsemblePipeline, PipelineProgram] | None:
        """Returns a pipeline and its program that can run ``requests`` now as one batch. Returns None if no pipeline can."""
        if version.loaded.streams or any(tensor not in requests[0].arrays for tensor in version.signature.inputs):
            return None
        if self._changes != self._models.changes or len(self._known) >= _LIMIT:
            self.forget_gone()
        if any(needs_steps(request) for request in requests):
            return None
        first = requests[0].outputs
        alike = all(request.outputs.keys() == first.keys() for request in requests)
        needed = graph.needed(first if alike else ())
        pipeline = self._known.get((version, needed.outputs))
        if pipeline is None:
            try:
                pipeline = self._known[version, needed.outputs] = EnsemblePipeline(version, graph, needed, self._models)
            except NotFound:
                # One of its models has gone, and the step will say so.
                return None
        program = pipeline.program(sum([request.rows for request in requests]))
        return None if program is None or not pipeline.free or not program.takes(requests) else (pipeline, program)

    def forget_gone(self) -> None:
        """Empties the cache of pipelines, so that unloaded models can be freed. ``find`` makes new pipelines."""
        # Pipelines would keep unloaded models alive.
        self._known.clear()
        self._changes = self._models.changes

    def __repr__(self) -> str:
        return f"<EnsemblePipelines {len(self._known)}>"


def needs_steps(request: Request) -> bool:
    """Returns whether ``request`` names a parameter set, or asks for the name of the parameter set that was used.

    If so, an ensemble answers ``request`` only by sending separate requests to the ensemble's models.
    """
    return bool(request.own.parameter_set or request.prepared.parameters.get(TELLING_PARAMETER))


def _program(step: _Step, batches: bool, rows: int) -> Executable | None:
    member = step.version
    loaded, model, specs = member.loaded, member.jitted, member.signature.inputs
    if model is None or loaded.instances or loaded.made_inputs or member.sequences is not None or loaded.streams:
        return None
    if (
        member.cache is not None
        or not loaded.repeatable
        or member.signature.batches != batches
        or (batches and not loaded.batch_rules.joins)
        or member.batcher.delays
    ):
        return None
    if step.inputs.keys() != specs.keys() or any(-1 in spec.model_dims for spec in specs.values()):
        return None
    if any(spec.reshaped for spec in specs.values()):
        return None
    if any(-1 in spec.model_dims for spec in member.signature.outputs.values()):
        return None
    return model.single(tuple(spec.model_dims for spec in specs.values()), rows)
