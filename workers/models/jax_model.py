"""A jitted model: requests are padded into a bucket, run by its executable on the worker's execution thread, sliced back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from shm.arrays import Array
from shm.errors import InvalidArgument, Unsupported
from workers.models.execution import Execution, describe_failure
from workers.native import output_memory
from workers.programs.carry import Carry
from workers.programs.executables import Executable, Executables, Wanted
from workers.programs.lowering import is_numeric
from workers.programs.series import MOST, Series
from workers.programs.series_program import SeriesProgram
from workers.requests.request import Request
from workers.requests.result import Result
from workers.tensors.batch_outputs import BatchOutputs, layout_of, uncut
from workers.tensors.buckets import Buckets, Shapes, sliced
from workers.tensors.signature import Signature


class JaxModel:
    """One version of a jitted model. Everything but ``executables.compile`` belongs to the execution thread."""

    def __init__(
        self,
        version: int,
        signature: Signature,
        buckets: Buckets,
        executables: Executables,
        instances: int = 1,
        alone: bool = False,
    ) -> None:
        """``instances``: how many threads execute it. ``alone``: requests that cannot share a batch share no call either."""
        for spec in (*signature.inputs.values(), *signature.outputs.values()):
            if not is_numeric(spec):
                raise Unsupported(
                    f"model '{signature.model}': {spec.datatype} of '{spec.name}' cannot be jitted; "
                    "declare 'host = True' in model.py"
                )
        self.executables = executables
        reshaped = any(spec.reshaped for spec in signature.outputs.values())
        #: Where requests cannot share a batch, quick ones may share a call.
        alone = bool(alone or signature.batches or buckets.axes or reshaped or instances > 1)
        # A series is stacked by the host, for programs of which a call is most of the cost.
        self.series = None if alone or executables.device is not None else Series(signature, executables.apply)
        #: The state of its sequences, if it keeps any, where the worker's loop runs it.
        self._carry = executables.carry()
        self._version = version
        self._signature = signature
        self._buckets = buckets
        self._fixed: Shapes | None = None
        if buckets.fixed:
            self._fixed = tuple(spec.model_dims for spec in signature.inputs.values())
        #: Whether shapes say more than themselves: axes that must agree, or that are padded.
        self._named = any(axis is not None for spec in signature.inputs.values() for axis in spec.axes)
        #: Outputs with an axis that may come back padded.
        self._padded = any(
            axis in buckets.axes for spec in signature.outputs.values() for axis in spec.axes if axis is not None
        )
        self._cut = self._padded or any(spec.reshaped for spec in signature.outputs.values())
        #: The rows of an output are, byte by byte, what its clients get.
        self._plain = not self._cut and executables.device is None

    def key(self, arrays: Mapping[str, Array]) -> Shapes:
        """What requests must have in common to run together: the shapes after bucketing.

        Raises: InvalidArgument: axes of one name have different sizes.
        """
        if self._fixed is not None:
            return self._fixed
        if not self._named:
            lead = 1 if self._signature.batches else 0
            return tuple([arrays[name].shape[lead:] if name in arrays else None for name in self._signature.inputs])
        self._lengths(arrays)
        shapes: list[tuple[int, ...] | None] = []
        for spec in self._signature.inputs.values():
            array = arrays.get(spec.name)
            if array is None:
                shapes.append(None)
            else:
                shapes.append(self._buckets.padded(spec, array.shape[1:] if self._signature.batches else array.shape))
        return tuple(shapes)

    def _lengths(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        """Axis name -> size, as this request has it."""
        lengths: dict[str, int] = {}
        for spec in self._signature.inputs.values():
            array = arrays.get(spec.name)
            if array is None:
                continue
            for axis, size in zip(spec.axes, array.shape[1:] if self._signature.batches else array.shape, strict=True):
                if axis is not None and lengths.setdefault(axis, size) != size:
                    raise InvalidArgument(
                        f"input '{spec.name}' of model '{self._signature.model}': axis '{axis}' has size {size}, "
                        f"{lengths[axis]} in another input"
                    )
        return lengths

    def wanted_by(self, requests: Sequence[Request]) -> Wanted:
        """The executable for a batch of compatible requests."""
        first = requests[0]
        # A request that must run alone has a key of its own, which says more than its shapes.
        shapes: Shapes = self.key(first.arrays) if first.submit.strikes else first.key  # type: ignore[assignment]
        rows = first.rows if len(requests) == 1 else sum([request.rows for request in requests])
        return Wanted(self._buckets.rows(rows), shapes)

    def find(self, requests: Sequence[Request]) -> Executable | None:
        """Their executable, if it is compiled."""
        return self.executables.find(self.wanted_by(requests))

    def programs(self, key: Shapes, most: int) -> list[Executable | SeriesProgram | None]:
        """By the rows of requests of that key that wait, up to ``most``: what runs them, or the first of them. None: not settled.

        Asking changes nothing.
        """
        if self.series is not None:
            return [self.series.ready(key, waiting) for waiting in range(1, MOST + 1)]
        if not self._plain or self._carry is not None:
            return []
        return [self.executables.planned(Wanted(self._buckets.rows(rows), key)) for rows in range(1, most + 1)]

    def sizes(self, executable: Executable | SeriesProgram, requests: Sequence[Request]) -> Mapping[str, int] | None:
        """Output -> bytes, if they are large, known, and as the program makes them what a lone request is answered with."""
        if not isinstance(executable, Executable) or executable.memory_of_outputs is None or self._carry is not None:
            return None
        sizes = executable.memory_of_outputs.sizes
        alone = self._plain and self._whole(requests, executable.wanted.rows)
        return sizes if alone and max(sizes.values(), default=0) >= output_memory.WORTH else None

    def is_whole(self, execution: Execution) -> bool:
        """Whether a run was of one request, its inputs as the program takes them, and its outputs as they were made."""
        executable, requests = execution.executable, execution.requests
        if (
            not isinstance(executable, Executable)
            or not self._plain
            or self._carry is not None
            or not self._whole(requests, executable.wanted.rows)
        ):
            return False
        arrays, lead = requests[0].arrays, 1 if self._signature.batches else 0
        shapes = zip(self._signature.inputs, executable.wanted.shapes, strict=True)
        return all(shape is None or arrays[name].shape[lead:] == shape for name, shape in shapes)

    def _whole(self, requests: Sequence[Request], bucket: int) -> bool:
        """Whether a program's outputs are one request's, with nothing to be cut off."""
        return not self._cut and len(requests) == 1 and (not self._signature.batches or requests[0].rows == bucket)

    def execute(self, execution: Execution, carry: Carry | None = None) -> None:
        """``carry``: the state of its sequences, where an instance of its own runs it.

        Raises: LookupError: its executable is not compiled; ask ``find`` first.  StateLost: it failed, and that state is gone.
        """
        requests = execution.requests
        executable: Executable | SeriesProgram | None = execution.executable
        if executable is None:
            executable = self.find(requests)
            if executable is None:
                raise LookupError(f"no executable for {self.wanted_by(requests)}")
            execution.executable = executable
        carry = carry or self._carry
        if isinstance(executable, SeriesProgram):
            self._execute_series(execution, executable)
            return
        # Where the device has the carry already, what fails is told as a loss.
        execution.intact = carry is not None
        arguments, execution.copied_byte_size = executable.gather(requests)
        execution.gathered_ns = time.monotonic_ns()
        places = execution.places
        if carry is None:
            made = executable.compute(arguments, {} if places is None else places.addresses)
            # All of them are waited for: only then has the program read its last input.
            outputs = self._outputs(executable, made)
        else:
            outputs = self._step(carry, executable, arguments, requests)
        if places is not None:
            places.written = executable.written(outputs, places.addresses)
        execution.computed_ns = time.monotonic_ns()
        rows = executable.wanted.rows
        execution.computed(
            self._uncut(executable, outputs) if self._plain and places is None else None,
            lambda: self._split(requests, rows, outputs),
        )
        if self.series is not None:
            self.series.note(requests[0], execution.computed_ns - execution.gathered_ns)

    def _step(
        self, carry: Carry, executable: Executable, arguments: dict[str, Any], requests: Sequence[Request]
    ) -> dict[str, Array]:
        made = carry.run(executable.call, arguments, executable.wanted.rows, requests)
        try:
            return self._outputs(executable, made)
        except BaseException as error:
            raise carry.failed() from error

    def _outputs(self, executable: Executable, made: dict[str, Any]) -> dict[str, Array]:
        device = executable.device
        if device is None:
            return {name: np.asarray(made[name]) for name in self._signature.outputs}
        jax.block_until_ready(made)
        # Not arrays of the host yet: where they go decides which way they leave the device.
        return {name: cast(Array, device.keep(made[name])) for name in self._signature.outputs}

    def _uncut(self, executable: Executable, outputs: dict[str, Array]) -> BatchOutputs | None:
        if executable.layout is None:
            executable.layout = layout_of(self._signature, outputs, self._signature.batches)
        return uncut(executable.layout, list(outputs.values()))

    def _execute_series(self, execution: Execution, program: SeriesProgram) -> None:
        execution.copied_byte_size = program.gather(execution.requests)
        execution.gathered_ns = time.monotonic_ns()
        stacks = program.run()
        execution.computed_ns = time.monotonic_ns()
        execution.runs = len(execution.requests)
        if execution.runs == 1 and self.series is not None:
            self.series.note(execution.requests[0], execution.computed_ns - execution.gathered_ns)
        execution.computed(program.uncut(stacks), lambda: program.split(stacks))

    def _split(self, requests: Sequence[Request], bucket: int, outputs: dict[str, Array]) -> list[Result]:
        batches = self._signature.batches
        if self._whole(requests, bucket):
            return [outputs]
        results: list[Result] = []
        at = 0
        for request in requests:
            lengths = self._lengths(request.arrays) if self._padded else {}
            result: dict[str, Array] = {}
            for name, array in outputs.items():
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
