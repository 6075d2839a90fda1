"""A program that applies a model to several requests, one after the other, and to each as if it had come alone.

    argument   | request 0: its inputs | request 1: its inputs | ... |      one for each dtype among the inputs (``Packing``)
    program    loop: unpack ▸ apply ▸ pack
    result     | request 0: its outputs | request 1: its outputs | ... |    one for each dtype among the outputs

``apply`` stays a computation of its own inside the loop. Were it compiled together with what is around it, XLA would put other
operations into one kernel than it does for a request alone, and a product that is added to something would be rounded, or not.
With numbers of 16 bits or fewer that happens all the same on processors that compute with them, so such models have no series.
From JAX 0.11 on, it also happens to small loops on a CPU, which XLA compiles with what is in them as one function: that is turned
off for the loop here, and models with loops of their own, which keep it when they run alone, have no series.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from tensord.shm.arrays import Array, address_of
from tensord.workers.programs.executables import Apply
from tensord.workers.programs.gather_buffer import aligned, copy_into
from tensord.workers.programs.placement import Placement
from tensord.workers.programs.precision import precision
from tensord.workers.programs.run_errors import memory_needed
from tensord.workers.requests.request import Request
from tensord.workers.requests.result import Result
from tensord.workers.tensors.batch_outputs import BatchOutputs, Packing, layout_of_rows, uncut
from tensord.workers.tensors.buckets import Shapes
from tensord.workers.tensors.signature import Signature

#: A value of such a type, as JAX prints what it traced.
_NARROW_FLOAT = re.compile(r"\b(bf16|f16|f8_\w+|f4_\w+)\[")
#: An operation that is a loop, as JAX prints what it traced.
_LOOP = re.compile(r"\b(while|scan)\[")
_JOINS_SMALL_LOOPS = jax.__version_info__[:2] > (0, 10)
_OPTIONS = {"xla_disable_hlo_passes": "small-while-loop-hoisting"} if _JOINS_SMALL_LOOPS else {}


class SeriesWanted(NamedTuple):
    """A program: how many requests of which shapes."""

    length: int
    shapes: Shapes


class _Place(NamedTuple):
    """Where one input of one request goes."""

    name: str
    array: Array
    #: The same memory.
    content: memoryview


class SeriesProgram:
    """One compiled program with the memory its requests are stacked in. Used by the execution thread only."""

    __slots__ = ("_arguments", "_byte_size", "_call", "_layout", "_outputs", "_places", "_signature", "wanted")

    def __init__(
        self,
        wanted: SeriesWanted,
        signature: Signature,
        call: functools.partial[Any],
        inputs: Packing,
        outputs: Packing,
    ) -> None:
        """``call`` is the compiled program with its parameters, and takes the stacks."""
        self.wanted = wanted
        self._signature = signature
        self._call = call
        self._outputs = outputs
        self._layout = layout_of_rows(signature, outputs)
        self._arguments = tuple([aligned((wanted.length, size), dtype) for dtype, size in inputs.rows])
        #: The inputs of one request.
        self._byte_size: int = sum([stack.nbytes for stack in self._arguments]) // wanted.length
        #: Of each request in turn.
        self._places = [
            [
                _Place(name, array, array.reshape(-1).view(np.uint8).data)
                for name, array in inputs.unpack([stack[i] for stack in self._arguments]).items()
            ]
            for i in range(wanted.length)
        ]

    @property
    def rows(self) -> int:
        """How many requests it is for."""
        return self.wanted.length

    @property
    def memory_needed(self) -> int | None:
        """As ``run_errors.memory_needed``."""
        return memory_needed(self._call.func)

    #: What earlier requests left behind them is computed once more, and nobody looks at it.
    clears = False

    @property
    def share(self) -> float:
        """As ``weight.share_of``. XLA does not count its loop; only programs with little to do are repeated in one."""
        return self.wanted.length / 64

    @property
    def memory(self) -> list[tuple[str, int, int]]:
        """Where each input of the first request goes: name, address, and how far behind it that of the next request is."""
        steps = [stack.strides[0] for stack in self._arguments]
        starts = [address_of(stack) for stack in self._arguments]
        found: list[tuple[str, int, int]] = []
        for name, array, _ in self._places[0]:
            at = address_of(array)
            (step,) = [step for start, step in zip(starts, steps, strict=True) if start <= at < start + step]
            found.append((name, at, step))
        return found

    def gather(self, requests: Sequence[Request]) -> int:
        """Stacks the inputs of at most ``wanted.length`` requests; returns the bytes copied.

        Raises: ValueError: there are more requests than that.
        """
        if len(requests) > self.wanted.length:
            raise ValueError(f"{len(requests)} requests for a program of {self.wanted.length}")
        for request, places in zip(requests, self._places, strict=False):
            contents = request.contents
            for name, array, target in places:
                content = None if contents is None else contents[name]
                if isinstance(content, (bytes, memoryview)):
                    target[:] = content
                else:
                    copy_into(array, request.arrays[name])
        return self._byte_size * len(requests)

    def run(self) -> list[Array]:
        """Computes what was gathered; returns when nobody reads it any more. The results' first dimension counts the requests."""
        if self._signature.wide:
            with precision(self._signature):
                made, _ = self._call(self._arguments)
        else:
            made, _ = self._call(self._arguments)
        return [np.asarray(stack) for stack in made]

    def uncut(self, stacks: Sequence[Array]) -> BatchOutputs | None:
        """What ``run`` gave, for answers that are cut from it as bytes. None: it is too large for this."""
        return uncut(self._layout, stacks)

    def split(self, stacks: Sequence[Array]) -> list[Result]:
        """What ``run`` gave, for each request by itself, and for each that there was room for."""
        return [self._outputs.unpack([stack[i] for stack in stacks]) for i in range(self.wanted.length)]

    def __repr__(self) -> str:
        return f"<SeriesProgram {self.wanted}>"


def compile_series(
    wanted: SeriesWanted, signature: Signature, apply: Apply, placement: Placement
) -> SeriesProgram | None:
    """Makes a program; in any thread. None: it might not give what each request gets alone. Raises whatever tracing raises.

    ``placement``: that of a single request's program, because several threads may add numbers in another order than one.
    """

    def inner(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        # What the model calls in turn is compiled as ever.
        with set_xla_metadata(inlineable=None):
            return apply(parameters, inputs)

    alone = jax.jit(inner)
    given = {
        spec.name: placement.spec(shape, spec.dtype)
        for spec, shape in zip(signature.inputs.values(), wanted.shapes, strict=True)
        if shape is not None
    }
    with precision(signature):
        known = placement.parameter_specs
        traced, made = jax.make_jaxpr(apply, return_shape=True)(known, given)
        text = str(traced)
        if _NARROW_FLOAT.search(text) or (_JOINS_SMALL_LOOPS and _LOOP.search(text)):
            return None
        inputs = Packing([(name, spec.shape, spec.dtype) for name, spec in given.items()])
        outputs = Packing([(name, made[name].shape, made[name].dtype) for name in signature.outputs])

        def series(parameters: Any, stacks: tuple[Any, ...]) -> tuple[Any, Any]:
            def step(_: None, rows: tuple[Any, ...]) -> tuple[None, tuple[Any, Any]]:
                tensors = inputs.unpack(rows)
                with set_xla_metadata(inlineable="false"):
                    results = alone(parameters, tensors)
                # Nobody asks for what is not declared, but without it another program would be compiled.
                undeclared = {name: result for name, result in results.items() if name not in signature.outputs}
                return None, (outputs.pack(results), undeclared)

            made: tuple[Any, Any] = jax.lax.scan(step, None, stacks, length=wanted.length)[1]
            return made

        stacks = tuple([placement.spec((wanted.length, size), dtype) for dtype, size in inputs.rows])
        call = placement.compile(jax.jit(series).lower(known, stacks), _OPTIONS)
    return SeriesProgram(wanted, signature, functools.partial(call, placement.parameters), inputs, outputs)
