"""Runs a jitted model: a batch is padded to a bucket's shape, run by the executable for that shape, and cut into answers."""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tensord.shm.arrays import Array
from tensord.shm.errors import Unsupported
from tensord.workers.models.execution import Execution
from tensord.workers.models.free_state import FreeState
from tensord.workers.models.instance import Instantiated
from tensord.workers.models.statistics import NativeRuns
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.parameters.set_stack import Chosen
from tensord.workers.programs.carry import Carry, rows_argument
from tensord.workers.programs.executable import Content, Executable, ExecutionDevice, RunOutputs, Wanted
from tensord.workers.programs.executables import Executables
from tensord.workers.programs.gather_buffer import aligned
from tensord.workers.programs.grouped_calls import MOST, GroupedCalls, GroupedProgram
from tensord.workers.programs.lowering import is_numeric
from tensord.workers.programs.run_errors import describe_failure
from tensord.workers.requests.request import Request
from tensord.workers.requests.result import Result
from tensord.workers.scheduling.queue import shapes_of
from tensord.workers.tensors.buckets import Buckets, RequestShapes, Shapes, sliced
from tensord.workers.tensors.ragged import cut
from tensord.workers.tensors.signature import Signature
from tensord.workers.threads.cancellation import Cancellation


class GatheredRun:
    """Runs a compiled program for sequences with state. The caller copies a batch's inputs into the program's buffers first.

    Only one thread may use this object. The thread must read a batch's outputs before it runs the next batch.
    """

    def __init__(self, executable: Executable, carry: Carry, signature: Signature) -> None:
        self._executable = executable
        self._carry = carry
        self._nobody = rows_argument(signature, executable.rows, ())
        self._rows = aligned(self._nobody.shape, self._nobody.dtype)
        self._rows[...] = self._nobody
        #: How many rows belonged to sequences in the last run.
        self._used = 0

    def __call__(self, slots: Sequence[int], starts: Sequence[bool]) -> list[Content]:
        """Runs the batch that the caller has copied into the program's buffers. Returns the outputs in host memory.

        Request i of the batch has row i. ``slots``: for each request, the index of its sequence in the
        model's arrays of states. ``starts``: for each request, whether its sequence begins.
        Raises StateLost: the run failed, and the state of all sequences is lost. After any other error all state is as before.
        """
        rows, used = self._rows, len(slots)
        rows[0, :used] = slots
        rows[1, :used] = starts
        if used < self._used:
            rows[:, used : self._used] = self._nobody[:, used : self._used]
        self._used = used
        executable = self._executable
        step = functools.partial(executable.call, executable.parameters())
        return self._carry.run(step, executable.arguments(), rows, executable.read)

    def __repr__(self) -> str:
        return f"<GatheredRun {self._executable.wanted}>"


class JaxModel:
    """Runs the batches of one version of a jitted model with its compiled programs.

    Only the thread that runs the model may use it, except for ``executables.compile``.
    """

    def __init__(
        self,
        version: int,
        signature: Signature,
        buckets: Buckets,
        executables: Executables,
        instances: int = 1,
        alone: bool = False,
        free_state: FreeState | None = None,
    ) -> None:
        """Makes a model of compiled programs. Raises Unsupported if a tensor has a datatype that JAX cannot compile.

        ``instances``: how many threads run the model. ``alone``: if True, and the model has no batch dimension, each call
        of a program computes only one request. ``free_state``: keeps the state of sequences, if the size of this state varies.
        """
        for spec in (*signature.inputs.values(), *signature.outputs.values()):
            if not is_numeric(spec):
                raise Unsupported(
                    f"model '{signature.model}': {spec.datatype} of '{spec.name}' cannot be jitted; "
                    "declare 'host = True' in model.py"
                )
        self.executables = executables
        #: Its parameters.
        self.sets = executables.sets
        reshaped = any(spec.reshaped for spec in signature.outputs.values())
        #: Where requests cannot share a batch, quick ones may share a call.
        alone = bool(alone or signature.batches or buckets.axes or reshaped or instances > 1)
        self.grouped = None if alone else GroupedCalls(signature, executables.apply)
        #: The state of its sequences, if it keeps any, where the worker's loop runs it.
        self._carry = executables.carry()
        self._version = version
        self._signature = signature
        self._buckets = buckets
        #: Requests of different lengths share a batch, so its shapes are known when it is there.
        self.ragged = signature.ragged
        #: True if requests may be smaller than the rows they are computed as.
        self._pads = bool(buckets.axes) or signature.ragged
        self._shapes = RequestShapes(signature, buckets)
        #: Returns the value that requests must have in common to run together.
        self.key = self._shapes.key
        #: True if an output has an axis that may come back padded.
        self._padded = any(
            axis in buckets.axes for spec in signature.outputs.values() for axis in spec.axes if axis is not None
        )
        #: Outputs that are cut like an input, each with that input.
        self._cuts = [
            (name, signature.inputs[spec.cut_like]) for name, spec in signature.outputs.items() if spec.cut_like
        ]
        self._cut = self._padded or bool(self._cuts) or any(spec.reshaped for spec in signature.outputs.values())
        #: The rows of an output are, byte by byte, what its clients get.
        self._plain = not self._cut and free_state is None
        self.free_state = free_state

    def for_instances(self, count: int, alone: bool) -> JaxModel:
        """Returns another ``JaxModel`` with the same compiled programs, which ``count`` threads may run at the same time.

        If ``alone`` is True, and the model has no batch dimension, each call of a program computes only one request.
        """
        return JaxModel(self._version, self._signature, self._buckets, self.executables, count, alone)

    def wanted_by(self, requests: Sequence[Request]) -> Wanted:
        """Returns the rows and input shapes of the program for ``requests`` as one batch. All requests must share a ``key``."""
        first = requests[0]
        # A request that must run alone has a key of its own, which says more than its shapes.
        shapes: Shapes = self.key(first.arrays) if first.own.strikes else shapes_of(first.key)  # type: ignore[assignment]
        if self.ragged:
            return Wanted(*self._buckets.settled(shapes, requests))
        rows = first.rows if len(requests) == 1 else sum([request.rows for request in requests])
        return Wanted(self._buckets.rows(rows), shapes)

    def fitting(self, requests: Sequence[Request]) -> int:
        """Returns how many requests, from the start of ``requests``, fit into the largest program together."""
        return self._buckets.fitting(requests) if self.ragged else len(requests)

    def find(self, requests: Sequence[Request]) -> Executable | None:
        """Returns the executable that runs ``requests`` as one batch, or None if it is not compiled yet."""
        return self.executables.find(self.wanted_by(requests))

    def programs(self, key: Shapes, most: int) -> list[Executable | GroupedProgram | None]:
        """Returns the compiled programs with which C code can run batches of 1, 2, ... ``most`` rows, in this order.

        ``key``: the shapes of the inputs. An item is None if C code cannot run batches of that size, or not yet. The list is
        empty if only Python can run the model's batches. If one call of a model without batch axis can run several requests,
        ``most`` is ignored: the list has the programs to call if 1, 2, ... ``grouped_calls.MOST`` requests wait. Such a program
        may run fewer requests in one call than wait.
        """
        if self.grouped is not None:
            # What does not share calls, or not yet, is run one after the other.
            single = self.executables.find(Wanted(1, key)) if self._plain else None
            return [self.grouped.find(key, waiting) or single for waiting in range(1, MOST + 1)]
        if not self._plain or self.ragged:
            return []
        planned = [self.executables.made.get(Wanted(self._buckets.rows(rows), key)) for rows in range(1, most + 1)]
        return [program if program is not None and program.gathers else None for program in planned]

    def prepare_grouped(self, cancellation: Cancellation) -> None:
        """Makes programs that run several requests in one call. Takes compiled programs from a cache if the cache has them.

        Does nothing if the model has a batch dimension, or if two requests must not run in one call.
        Raises Cancelled: the load was cancelled. Errors of the model's function while JAX traces it are raised unchanged.
        """
        if self.grouped is not None:
            make = functools.partial(self.executables.kept_grouped, cancellation)
            for single in self.executables.made.values():
                if self.grouped.wants(single):
                    self.grouped.add(single, self.grouped.compile(single, make))

    def gathered_run(self, executable: Executable) -> Callable[[Sequence[int], Sequence[bool]], list[Content]]:
        """Returns a function ``run(slots, starts)``, which runs one batch on ``executable`` like a ``GatheredRun``.

        Before each call, the caller must write the batch's inputs to the arrays of ``executable.gathered``. If the model has no
        state, ``slots`` and ``starts`` have no effect.
        """
        if self._carry is None:
            return lambda slots, starts: executable.run()
        return GatheredRun(executable, self._carry, self._signature)

    def single(self, shapes: Shapes, rows: int) -> Executable | None:
        """Returns the compiled program that can run a request of ``rows`` rows with inputs of the shapes ``shapes``.

        Returns None if the program is not compiled, or if the model has state, ragged inputs, varying shapes or several devices.
        """
        several = self.executables.several is not None
        if not self._plain or self._carry is not None or self._buckets.axes or self.ragged or several:
            return None
        return self.executables.made.get(Wanted(self._buckets.rows(rows), shapes))

    def sizes(self, executable: Executable | GroupedProgram, requests: Sequence[Request]) -> Mapping[str, int] | None:
        """Returns output name -> bytes of memory that the caller reserves for the output before a run. None: no memory."""
        if not isinstance(executable, Executable) or self._carry is not None:
            return None
        return executable.sizes(requests, self._plain and self._whole(requests, executable.wanted.rows))

    def is_whole(self, execution: Execution) -> bool:
        """Returns whether ``execution`` ran a single request of a stateless model without padding or reshaping any tensor."""
        executable, requests = execution.executable, execution.requests
        if (
            not isinstance(executable, Executable)
            or not self._plain
            or self._carry is not None
            or self.ragged
            or not self._whole(requests, executable.wanted.rows)
        ):
            return False
        arrays, lead = requests[0].arrays, 1 if self._signature.batches else 0
        shapes = zip(self._signature.inputs, executable.wanted.shapes, strict=True)
        return all(shape is None or arrays[name].shape[lead:] == shape for name, shape in shapes)

    def _whole(self, requests: Sequence[Request], bucket: int) -> bool:
        return not self._cut and len(requests) == 1 and (not self._signature.batches or requests[0].rows == bucket)

    def execute(self, execution: Execution, carry: Carry | None = None) -> None:
        """Runs a batch and stores its outputs in ``execution``. Raises LookupError: no program for the batch is compiled.

        ``carry``: the state of sequences that the batch reads and changes; None: the state that this ``JaxModel`` keeps.
        Raises StateLost: the run failed, and all of this state is lost.
        """
        requests = execution.requests
        executable: Executable | GroupedProgram | None = execution.executable
        if executable is None:
            executable = self.find(requests)
            if (
                executable is None
                and execution.whole is not None
                and isinstance(execution.whole.executable, Executable)
            ):
                # What its requests need by themselves nobody has asked for: that of the failed batch pads them.
                executable = execution.whole.executable
            if executable is None:
                raise LookupError(f"no executable for {self.wanted_by(requests)}")
            execution.executable = executable
        carry = carry or self._carry
        chosen = execution.choose(self.sets)
        if isinstance(executable, GroupedProgram):
            assert isinstance(chosen, ParameterSet)
            self._execute_grouped(execution, executable, chosen)
            return
        # Where the device has the carry already, a failure is reported as a loss.
        execution.intact = carry is not None or self.free_state is not None
        arguments, execution.copied_byte_size = executable.gather(requests)
        execution.gathered_ns = time.monotonic_ns()
        places = execution.places
        if carry is None:
            outputs = executable.compute(executable.parameters(chosen), arguments, requests, places)
        else:
            outputs = self._step(carry, executable, chosen, arguments, requests)
        execution.computed_ns = time.monotonic_ns()
        rows = executable.wanted.rows
        execution.cut = lambda: self._split(requests, rows, outputs.arrays)
        if self._plain and places is None and _any_leaves(requests):
            execution.outputs = executable.uncut(outputs)
        if self._pads or len(requests) > 1 or requests[0].rows != rows:
            execution.padding = self._padding(executable, requests)

    @property
    def full_sizes(self) -> frozenset[int] | None:
        """The batch sizes that never need padding, or None if the model has no batch dimension."""
        if self._pads:
            return frozenset()
        return frozenset(self._buckets.batch) if self._signature.batches else None

    def _padding(self, executable: Executable, requests: Sequence[Request]) -> tuple[int, int]:
        rows = executable.rows - sum([request.rows for request in requests]) if self._signature.batches else 0
        if not self._pads:
            return rows, rows * executable.elements // executable.rows
        given = sum([math.prod(array.shape) for request in requests for array in request.arrays.values()])
        return rows, max(0, executable.elements - given)

    def padding(self, key: Shapes, done: NativeRuns) -> tuple[int, int]:
        """Returns how many rows and how many input elements of the runs that ``done`` counts were padding.

        ``key``: the input shapes of these runs. ``done``: the counts of runs that C code has made.
        """
        rows = elements = byte_size = 0
        inputs, outputs = self._signature.inputs.values(), self._signature.outputs.values()
        row = sum([spec.dtype.itemsize * math.prod(shape or ()) for spec, shape in zip(inputs, key, strict=True)])
        for size, count, *_ in done.batches if self._signature.batches else ():
            wanted = Wanted(self._buckets.rows(size), key)
            rows += (wanted.rows - size) * count
            byte_size += wanted.rows * count * row
            if (executable := self.executables.made.get(wanted)) is not None:
                elements += count * executable.elements
        answer = sum([spec.dtype.itemsize * math.prod(spec.model_dims) for spec in outputs])
        given = done.copied_byte_size - done.rows * answer if self._buckets.axes else byte_size - rows * row
        return rows, elements * max(0, byte_size - given) // byte_size if byte_size else 0

    def _step(
        self,
        carry: Carry,
        executable: Executable,
        chosen: Chosen,
        arguments: dict[str, Any],
        requests: Sequence[Request],
    ) -> RunOutputs:
        step = functools.partial(executable.call, executable.parameters(chosen))
        # Those of a warmup sample have no slot.
        used = [(request.slot.number, request.controls.start) for request in requests if request.version is not None]
        argument = rows_argument(self._signature, executable.wanted.rows, used)
        return carry.run(step, arguments, argument, lambda made: executable.outputs(made, requests))

    def _execute_grouped(self, execution: Execution, program: GroupedProgram, chosen: ParameterSet) -> None:
        execution.copied_byte_size = program.gather(execution.requests)
        execution.gathered_ns = time.monotonic_ns()
        stacks = program.run(chosen)
        execution.computed_ns = time.monotonic_ns()
        execution.runs = len(execution.requests)
        execution.cut = lambda: [*program.split(stacks)]
        if _any_leaves(execution.requests):
            execution.outputs = program.uncut(stacks)

    def _split(self, requests: Sequence[Request], bucket: int, outputs: dict[str, Array]) -> list[Result]:
        batches = self._signature.batches
        if self._whole(requests, bucket):
            return [outputs]
        results: list[Result] = []
        cuts: dict[str, list[Array]] = {}
        if self._cuts:
            cuts = {name: cut(outputs[name], source, requests) for name, source in self._cuts}
        at = 0
        for number, request in enumerate(requests):
            lengths = self._shapes.lengths(request.arrays) if self._padded else {}
            result: dict[str, Array] = {}
            for name, array in outputs.items():
                if cuts and name in cuts:
                    result[name] = cuts[name][number]
                    continue
                spec = self._signature.outputs[name]
                part = array[at : at + request.rows] if batches else array
                lead = part.shape[:1] if batches else ()
                inner = part.shape[len(lead) :]
                if lengths:
                    part = np.asarray(part)[(slice(None),) * len(lead) + sliced(spec, inner, lengths)]
                if spec.reshaped:
                    part = part.reshape(lead + spec.to_client(part.shape[len(lead) :]))
                result[name] = part
            results.append(result)
            at += request.rows
        return results

    def describe(self, error: BaseException) -> str:
        return describe_failure(self._signature.model, self._version, error)


def _any_leaves(requests: Sequence[Request]) -> bool:
    return requests[0].sink is None or any(request.sink is None for request in requests)


class JittedInstance(Instantiated):
    """One instance of a jitted model, with its own memory for inputs. Only the thread that runs the instance may use it.

    The instances of a model run in parallel. They share code and parameters. Each sequence and its state belong to one instance.
    """

    # On a GPU each instance copies on a stream of its own, so that the inputs of one are copied while a second one computes and
    # the outputs of a third one are copied back.
    def __init__(self, model: JaxModel, device: ExecutionDevice) -> None:
        """Makes an instance of ``model``. ``device``: its device, with input memory and a stream for this instance's thread."""
        self._model = model
        self._device = device
        #: The state of the sequences that run here, if the model keeps any.
        self._carry = model.executables.carry()
        #: The model's executable -> this thread's; an entry goes with the model's.
        self._twins: weakref.WeakKeyDictionary[Executable, Executable] = weakref.WeakKeyDictionary()

    def execute(self, execution: Execution) -> None:
        """Runs a batch and stores its outputs in ``execution``. Raises LookupError: no program for the batch is compiled.

        Raises StateLost: the run failed, and the state of all sequences of this instance is lost.
        """
        shared = execution.executable or self._model.find(execution.requests)
        if isinstance(shared, Executable):
            twin = self._twins.get(shared)
            if twin is None:
                twin = self._twins[shared] = shared.twin(self._device)
            execution.executable = twin
        self._model.execute(execution, self._carry)

    def describe(self, error: BaseException) -> str:
        return self._model.describe(error)

    def close(self) -> None:
        """Frees the instance's memory for the inputs of batches."""
        self._twins.clear()
        self._device.close()
