"""Runs compiled programs on generated inputs to find out whether they compute each row of a batch by itself.

The programs get the same rows in several batches: beside other generated rows, beside rows of zeros, at another position, and
in a batch of another size. The programs fail the test if an output for the same row changes by far more than rounding errors
explain, and if this happens with each of several generated batches. Differences that are NaN or infinite are ignored.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.stages import Traced

from tensord.shm.arrays import Array, drawn
from tensord.shm.common.derivatives import of_model
from tensord.shm.errors import Cancelled, Internal
from tensord.workers.jax_internals.wide import precision
from tensord.workers.programs.carry import rows_argument
from tensord.workers.programs.executable import Argument, Executable, specs_of
from tensord.workers.programs.row_reading import MOST_ITERATIONS, combining, ending, read
from tensord.workers.programs.weight import work_of
from tensord.workers.tensors.ragged import batch_input, cut, unit
from tensord.workers.tensors.signature import Signature

#: The programs that are asked, by their numbers of rows: each takes the inputs of a batch by name, and returns its outputs.
Runs = Mapping[int, Callable[[Mapping[str, Array]], Mapping[str, Array]]]
#: The most operations, or bytes read and written, of a program that is run on generated inputs.
TRIED_WORK = 1 << 32
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
#: The name, among generated inputs, of what is no input: each row's parameter set.
_SETS = "sets of the rows"
_log = logging.getLogger(__name__)


def rows_apart(
    model: str, ask: Callable[[], str | None], check: Callable[[], None], traced: Traced, rows: int, axis: str, why: str
) -> bool:
    """Raises Internal if rows of a batch affect each other. Returns False if the program failed in the check, else True.

    Args:
      ask: runs the model's program. Returns a sentence if rows affect each other, else None. Its errors are logged, and not
        raised, except for Cancelled.
      check: raises an error if the device has failed. This function calls it after an error of ``ask``.
      traced: JAX's trace of the model's program for ``rows`` rows.
      axis: what the message of the Internal error calls axis 0 of the arrays: "batch" or "slots".
      why: a known reason why a row may depend on its position in the batch, for this message; "": no reason is known.
    """
    try:
        found = ask()
    except Cancelled:
        raise
    except Exception as error:  # inputs that nobody would send say nothing about a model
        check()
        _log.info(
            "model '%s' fails with generated inputs (%s), which says nothing of its rows", model, type(error).__name__
        )
        return False
    if found is not None:
        if why and _BESIDE not in found:
            raise Internal(f"model '{model}': {found}; {why}")
        by, meant = combining(traced.jaxpr.jaxpr, rows), "rows_may_mix = True" if axis == "batch" else "slots = 1"
        meant += " in model.py says that it is meant"
        if of_model(model)[1]:
            meant = "A rule (custom_vjp, custom_jvp) of one row, mapped over the rows by jax.vmap, does that"
        raise Internal(
            f"model '{model}': {found}{by and '; probably by '}{by}. Rows of other clients and zeros are in a batch, so each row "
            f"has to be computed by itself (axis 0 is the {axis}). {meant}"
        )
    return True


def generated(inputs: Sequence[Argument], seed: int) -> dict[str, Array]:
    """Returns random arrays with the names, dtypes and shapes of ``inputs``."""
    random = np.random.default_rng(seed)
    return {name: drawn(dtype, shape, random) for name, dtype, shape in inputs}


def probe(
    signature: Signature, asked: Sequence[Executable], traced: Traced, remote: bool, check: Callable[[], None]
) -> str | None:
    """Runs a model's programs on generated inputs to find out whether the rows of a batch affect each other.

    Returns a sentence if they do, else None. Also returns None, without a run, if the programs are too costly or have effects.
    Args:
      signature: the inputs and outputs of the model.
      asked: the compiled programs to run. They differ in the batch size only. The first has a batch size of 2 or more.
      traced: JAX's trace of the model's function, from which the first program was compiled.
      remote: whether the programs run on a GPU.
      check: a function that is called before each run. Its errors, and those of the programs, are raised unchanged.
    """
    (rows, _), program, states, stack = asked[0].wanted, traced.jaxpr, signature.states, asked[0].sets.stack
    may_be_tried, loops, checks, rounding = read(program.jaxpr)
    looping = loops or checks
    most = TRIED_WORK / (MOST_ITERATIONS if looping else 1)
    # Only the first program is traced, to end, and only its rows are divided.
    alike = asked[:1] if looping or signature.ragged else asked
    light = [each for each in alike if 0 <= max(work_of(each.program)) <= most]
    elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((traced.args_info[0][1:], traced.out_info)))
    if asked[0] not in light or elements > _TRIED_ELEMENTS or not may_be_tried:
        return None

    @jax.jit
    def ended(*given: Any) -> Any:
        leaves = ending(program.jaxpr, program.consts, *jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), leaves)

    cuts = {name: signature.inputs[spec.cut_like] for name, spec in signature.outputs.items() if spec.cut_like}
    inputs = [(spec.name, spec.dtype, (rows, *spec.dims)) for spec in states]
    inputs += [(_SETS, np.dtype(np.int32), (rows,))] if stack is not None else []
    for spec, shape in specs_of(signature, asked[0].wanted):
        # What is ragged is divided evenly among the rows; what describes it is made for each run.
        each = shape[0] // unit(spec) // rows if spec.ragged else 0
        dims = [each if dim == -1 else dim for dim in spec.model_dims] if spec.ragged else shape
        inputs += [(spec.name, spec.dtype, (rows, *dims))] if spec.of_batch is None else []

    def run(executable: Executable, inputs: Mapping[str, Array]) -> dict[str, Array]:
        check()
        each_row = [{name: array[row : row + 1] for name, array in inputs.items()} for row in range(executable.rows)]
        requests: Any = [SimpleNamespace(arrays=own, rows=1) for own in each_row]
        # Not by the executable: on a GPU all share the memory for that, and others serve meanwhile.
        given = dict[str, Array]()
        for spec, shape in specs_of(signature, executable.wanted):
            if spec.of_batch is not None:
                source = signature.inputs[spec.of_batch.source]
                given[spec.name] = batch_input(spec, source, shape, executable.rows, requests)
            elif spec.ragged:
                given[spec.name] = np.pad(inputs[spec.name].ravel(), (0, shape[0] - inputs[spec.name].size))
            else:
                given[spec.name] = inputs[spec.name]
        parameters, more = executable.parameters(), tuple[Any, ...]()
        if stack is not None:
            parameters = parameters[0], inputs[_SETS] % stack.slots  # in free slots all parameters are 0
        if states:
            empty = signature.slots + 1 - executable.rows
            carry = {s.name: np.pad(inputs[s.name], [(0, empty), *((0, 0) for _ in s.dims)]) for s in states}
            more = rows_argument(signature, executable.rows, [(row, False) for row in range(executable.rows)]), carry
        with precision(signature.wide):
            made: Any = (ended if looping else executable.call)(parameters, given, *more)
            if states:
                made = made[0] | {spec.output: made[1][spec.name][: executable.rows] for spec in states}
            arrays = {name: np.array(made[name]) for name in (*signature.outputs, *(spec.output for spec in states))}
        return arrays | {name: np.concatenate(cut(arrays[name], source, requests)) for name, source in cuts.items()}

    runs = {each.rows: functools.partial(run, each) for each in light}
    return find_fault(runs, inputs, rows, max(rounding, DEVICE_ROUNDING if remote else 0.0))


def find_fault(runs: Runs, inputs: Sequence[Argument], rows: int, epsilon: float) -> str | None:
    """Tests with random inputs whether programs compute each row of a batch by itself. Returns None if so, else a sentence.

    ``runs``: the programs, by the number of rows that each computes. ``rows``: one of these numbers, at least 2.
    ``inputs``: name, dtype and shape of each input of the program ``runs[rows]``. ``epsilon``: the relative rounding error of
    the least exact datatype in the programs. Errors of the programs are raised unchanged.
    """
    found: dict[tuple[str, str], str] = {}
    for draw in range(_DRAWS):
        with np.errstate(all="ignore"):
            now = _faults(runs, inputs, rows, epsilon, draw)
        found = {fault: said for fault, said in now.items() if fault in found or not draw}
        if not found:
            return None
    return found[min(found, key=lambda fault: (_BESIDE, _PLACE, _ROWS).index(fault[1]))]


def _faults(runs: Runs, inputs: Sequence[Argument], rows: int, epsilon: float, draw: int) -> dict[tuple[str, str], str]:
    base, others = generated(inputs, 2 * draw), generated(inputs, 2 * draw + 1)
    run, made = runs[rows], runs[rows](base)
    #: Output, what it may depend on, and an array of it as it is and otherwise.
    pairs: list[tuple[str, str, Array, Array]] = []
    for kept in (slice(0, 1), slice(rows - 1, rows)):
        for beside in (others, {name: np.zeros_like(array) for name, array in base.items()}):
            mixed = {name: array.copy() for name, array in beside.items()}
            for name, array in mixed.items():
                array[kept] = base[name][kept]
            pairs += [(name, _BESIDE, made[name][kept], array[kept]) for name, array in run(mixed).items()]
    rolled = run({name: np.roll(array, 1, 0) for name, array in base.items()})
    pairs += [(name, _PLACE, made[name], np.roll(array, -1, 0)) for name, array in rolled.items()]
    for count in runs.keys() - {rows}:
        resized = {name: np.resize(array, (count, *array.shape[1:])) for name, array in base.items()}
        pairs += [(name, _ROWS, made[name][:count], array[:rows]) for name, array in runs[count](resized).items()]
    if not any(distances(one, other).any() for _, _, one, other in pairs):
        return {}
    noisy = [run(base), run({name: nudged(array, epsilon) for name, array in base.items()})]
    found = {}
    for name, on, one, other in pairs:
        apart, scale = beyond(one, other, made[name], [each[name] for each in noisy], epsilon)
        if apart.sum() > (0 if on == _BESIDE and scale else _SHARE * apart.size):
            most = distances(one, other).argmax()
            values = f"{one.ravel()[most].item():.6g} and {other.ravel()[most].item():.6g}"
            found[name, on] = (
                f"a row of output '{name}' depends on {on}: generated inputs gave {values} for the same row"
            )
    return found


def beyond(one: Array, other: Array, reference: Array, nearby: Sequence[Array], epsilon: float) -> tuple[Array, float]:
    """Returns a mask of the elements in which ``one`` and ``other`` differ too much, and a scale.

    Elements differ too much if their difference exceeds sqrt(``epsilon``) times the scale and also 8 times the noise.
    The scale is the largest finite absolute value in ``reference``, a program's output; for integers and booleans it is 0.0.
    The noise is the largest finite difference of ``reference`` and ``nearby``, this output for nearly the same inputs.
    """
    noise = max(np.max(distances(reference, each), initial=0.0) for each in nearby)
    scale = 0.0 if reference.dtype.kind in "biu" else np.max(distances(reference, 0), initial=0.0)
    return distances(one, other) > max(math.sqrt(epsilon) * scale, _TIMES * noise), scale


def nudged(array: Array, epsilon: float) -> Array:
    """Returns ``array`` with its floats multiplied by 1 + ``epsilon`` and 1 - ``epsilon`` in turn, and integers unchanged."""
    signs = 1 + epsilon * (1 - np.arange(array.size).reshape(array.shape) % 2 * 2)
    return array if array.dtype.kind in "biu" else (array * signs).astype(array.dtype)


def distances(one: Any, other: Any) -> Array:
    """Subtracts two arrays element by element, and returns the absolute differences. Infinite and NaN differences become 0."""
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    apart = np.abs(np.asarray(one).astype(wide) - np.asarray(other).astype(wide))
    return np.where(np.isfinite(apart), apart, 0.0)
