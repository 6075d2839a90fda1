"""Asks compiled programs whether they treat each row of a batch by itself.

A row stays while all others are drawn anew or are zeros, as in padding; all rows go to another place, and to the programs for
other numbers of rows. A program is accused only if an output then differs, for each of several draws, by far more than if it is
asked again, or if its inputs change by as little as their datatype allows. What is not finite says nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced

from tensord.shm.arrays import Array
from tensord.shm.errors import Internal
from tensord.workers.jax_internals.wide import precision
from tensord.workers.programs.carry import rows_argument
from tensord.workers.programs.executable import Argument, Executable, Wanted, arguments_of, specs_of
from tensord.workers.programs.row_reading import MOST_ITERATIONS, ending, read
from tensord.workers.programs.weight import work_of
from tensord.workers.tensors.ragged import batch_input, unit
from tensord.workers.tensors.signature import Signature

#: The programs that are asked, by their numbers of rows: each takes the inputs of a batch by name, and returns its outputs.
Runs = Mapping[int, Callable[[Mapping[str, Array]], Mapping[str, Array]]]
#: The most operations, or bytes read and written, of a program that is run on generated inputs.
_TRIED_WORK = 1 << 32
#: The most elements of its inputs and outputs together, which are held several times.
_TRIED_ELEMENTS = 1 << 23
#: The relative rounding error of products on a GPU (TF32), whatever their datatype.
DEVICE_ROUNDING = 2.0**-10
#: How many times inputs are generated before a program is accused.
_DRAWS = 3
#: By how many times more than noise, or than what a nudge does, an output has to change.
_TIMES = 8
#: The part of a row that has to change where other code or another place may round, and so decide, otherwise.
_SHARE = 1 / 16
_BESIDE, _PLACE, _ROWS = "the other rows of its batch", "its place in the batch", "the number of rows in its batch"


class RowFault(NamedTuple):
    """Names an output, what a row of it depends on besides itself, and the values of one element of the row in two runs."""

    output: str
    on: str
    one: complex
    other: complex

    def error(self, model: str, operation: str) -> Internal:
        """Returns the error with which the version is refused. ``operation``: what probably combines rows; "": not known."""
        by = operation and f"; probably by {operation}"
        return Internal(
            f"model '{model}': a row of output '{self.output}' depends on {self.on}: generated inputs gave {self.one:.6g} and "
            f"{self.other:.6g} for the same row{by}. Rows of other clients and zeros are in a batch, so each row has to be "
            "computed by itself (axis 0 is the batch). rows_may_mix = True in model.py says that it is meant"
        )


def generated(inputs: Sequence[Argument], seed: int) -> dict[str, Array]:
    """Returns inputs of these names, dtypes and shapes: normal numbers, and integers below 4, as indices and lengths may be."""
    random, made = np.random.default_rng(seed), dict[str, Array]()
    for name, dtype, shape in inputs:
        integers = random.integers(0, 2 if dtype == np.bool_ else 4, shape)
        made[name] = (integers if _counts(dtype) else random.normal(size=shape)).astype(dtype)
    return made


def probe(
    signature: Signature, asked: Sequence[Executable], traced: Traced, remote: bool, check: Callable[[], None]
) -> RowFault | None:
    """Runs programs on generated inputs of the same shapes to find out whether they mix the rows of a batch.

    Returns an output whose rows are mixed, with values that show this. Returns None if no output was found, or if the
    programs may not be run. ``asked``: the programs; the first is for 2 rows or more, and was compiled from ``traced``.
    ``remote``: they run on a GPU. ``check``: is called before each run. Raises whatever ``check`` or a program raises.
    """
    (rows, _), program, states = asked[0].wanted, traced.jaxpr, signature.states
    may_be_tried, looping, rounding = read(program.jaxpr)
    most = _TRIED_WORK / MOST_ITERATIONS if looping else _TRIED_WORK
    light = [each for each in asked if 0 <= max(work_of(each.program)) <= most]
    elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((traced.args_info[0][1:], traced.out_info)))
    if asked[0] not in light or elements > _TRIED_ELEMENTS or not may_be_tried:
        return None
    calls = {each.rows: (each, each.call) for each in light}
    if looping:
        structure = jax.tree.structure(traced.out_info)
        compiled = jax.jit(functools.partial(ending, program.jaxpr, program.consts))
        calls = {rows: (asked[0], lambda *given: jax.tree.unflatten(structure, compiled(*jax.tree.leaves(given))))}
    bounds, described = _divided(signature, asked[0].wanted) if signature.ragged else ({}, {})

    def run(executable: Executable, call: Callable[..., Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
        check()
        given: dict[str, Any] = {**inputs, **described}
        for name in bounds.keys() & inputs.keys():
            given[name] = inputs[name].copy()
            given[name][bounds[name][rows] :] = 0
        more: tuple[Any, ...] = ()
        if states:
            empty = signature.slots + 1 - executable.rows
            carry = {s.name: np.pad(given.pop(s.name), [(0, empty), *((0, 0) for _ in s.dims)]) for s in states}
            more = rows_argument(signature, executable.rows, [(row, False) for row in range(executable.rows)]), carry
        with precision(signature.wide):
            made: Any = call(executable.parameters(), given, *more)
            if states:
                made = made[0] | {spec.output: made[1][spec.name][: executable.rows] for spec in states}
            return {name: np.array(made[name]) for name in (*signature.outputs, *(spec.output for spec in states))}

    inputs = [each for each in arguments_of(signature, asked[0].wanted) if each[0] not in described]
    inputs += [(spec.name, spec.dtype, (rows, *spec.dims)) for spec in states]
    runs = {count: functools.partial(run, *call) for count, call in calls.items()}
    return find_fault(runs, inputs, rows, max(rounding, DEVICE_ROUNDING if remote else 0.0), bounds)


def _divided(signature: Signature, wanted: Wanted) -> tuple[dict[str, Sequence[int]], dict[str, Array]]:
    """Divides a batch's ragged inputs evenly among its rows. Returns two dicts. ``wanted``: the batch's rows and shapes.

    The first has, for each ragged input and each output that is divided like it, the element where each row begins, and
    where the last row ends. The second has the inputs that the worker makes from ragged inputs.
    """
    bounds, items, described = dict[str, Sequence[int]](), dict[str, Array](), dict[str, Array]()
    for spec, shape in specs_of(signature, wanted):
        if spec.ragged:
            each = shape[0] // unit(spec) // wanted.rows
            items[spec.name] = np.zeros((1, *(each if dim == -1 else dim for dim in spec.model_dims)), spec.dtype)
            bounds[spec.name] = range(0, shape[0] + 1, items[spec.name].size)
    requests: Any = [SimpleNamespace(arrays=items, rows=1)] * wanted.rows
    for spec, shape in specs_of(signature, wanted):
        if spec.of_batch is not None:
            source = signature.inputs[spec.of_batch.source]
            described[spec.name] = batch_input(spec, source, shape, wanted.rows, requests)
    return bounds | {s.name: bounds[s.cut_like] for s in signature.outputs.values() if s.cut_like}, described


def find_fault(
    runs: Runs, inputs: Sequence[Argument], rows: int, epsilon: float, bounds: Mapping[str, Sequence[int]]
) -> RowFault | None:
    """Runs programs on generated inputs. Returns what shows that an output depends on more than its row; None: nothing does.

    Args:
      inputs: of the program for ``rows`` rows, 2 or more.
      epsilon: the relative rounding error of the coarsest numbers that the program computes with.
      bounds: for each ragged tensor where each row begins, and the last one ends. Empty: rows also change places.
    Raises whatever a program raises.
    """
    found: dict[tuple[str, str], RowFault] = {}
    for draw in range(_DRAWS):
        with np.errstate(all="ignore"):
            faults = _faults(runs, inputs, rows, epsilon, bounds, draw)
        found = {fault[:2]: fault for fault in faults if fault[:2] in found or not draw}
        if not found:
            return None
    return min(found.values(), key=lambda fault: (_BESIDE, _PLACE, _ROWS).index(fault.on))


def _faults(
    runs: Runs, inputs: Sequence[Argument], rows: int, epsilon: float, bounds: Mapping[str, Sequence[int]], draw: int
) -> list[RowFault]:
    base, others = generated(inputs, 2 * draw), generated(inputs, 2 * draw + 1)
    run, made = runs[rows], runs[rows](base)
    #: Output, what it may depend on, and an array of it as it is and otherwise.
    pairs: list[tuple[str, str, Array, Array]] = []
    for kept in (0, rows - 1):
        place = {name: slice(*at[kept : kept + 2]) for name, at in bounds.items()}
        for beside in (others, {name: np.zeros_like(array) for name, array in base.items()}):
            mixed = {name: array.copy() for name, array in beside.items()}
            for name, array in mixed.items():
                at = place.get(name, slice(kept, kept + 1))
                array[at] = base[name][at]
            for name, array in run(mixed).items():
                at = place.get(name, slice(kept, kept + 1))
                pairs.append((name, _BESIDE, made[name][at], array[at]))
    if not bounds:
        rolled = run({name: np.roll(array, 1, 0) for name, array in base.items()})
        pairs += [(name, _PLACE, made[name], np.roll(array, -1, 0)) for name, array in rolled.items()]
        for count in runs.keys() - {rows}:
            resized = {name: np.resize(array, (count, *array.shape[1:])) for name, array in base.items()}
            pairs += [(name, _ROWS, made[name][:count], array[:rows]) for name, array in runs[count](resized).items()]
    if not any(distances(one, other).any() for _, _, one, other in pairs):
        return []
    noisy = [run(base), run({name: nudged(array, epsilon) for name, array in base.items()})]
    found = []
    for name, on, one, other in pairs:
        noise = max(np.max(distances(made[name], each[name]), initial=0.0) for each in noisy)
        scale = 0.0 if _counts(one.dtype) else np.max(distances(made[name], 0), initial=0.0)
        distance = distances(one, other)
        changed = distance > max(math.sqrt(epsilon) * scale, _TIMES * noise)
        if changed.sum() > (0 if on == _BESIDE and scale else _SHARE * changed.size):
            most = distance.argmax()
            found.append(RowFault(name, on, one.ravel()[most].item(), other.ravel()[most].item()))
    return found


def _counts(dtype: np.dtype[Any]) -> bool:
    return bool(dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer))


def nudged(array: Array, epsilon: float) -> Array:
    """Returns an array whose numbers are changed by ``epsilon`` of themselves, up and down in turn; integers stay."""
    signs = 1 + epsilon * (1 - np.arange(array.size).reshape(array.shape) % 2 * 2)
    return array if _counts(array.dtype) else (array * signs).astype(array.dtype)


def distances(one: Any, other: Any) -> Array:
    """Returns how far the elements of two arrays are from each other; 0 where one of them is not finite."""
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    apart = np.abs(np.asarray(one).astype(wide) - np.asarray(other).astype(wide))
    return np.where(np.isfinite(apart), apart, 0.0)
