"""Examines a traced JAX function: whether each trace gives the same program, and whether the function has likely mistakes.

A value that Python computes during a trace, such as the time or a random number of numpy, becomes a constant of the traced
program. A second trace then gives another program. The functions of this module run no program.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import jax
import numpy as np

from tensord.shm.errors import Internal

LEAKED = (
    "a value of one trace of the function is kept outside of it (in a list, an attribute, a global), where it is no array; "
    "return it as an output, keep it as state of a sequence, or compute it in create()"
)
#: Fewer bytes of constants are not worth a warning: masks, tables, positions.
_MIN_BYTE_SIZE = 1 << 20
#: Files with these in their names are not the author's: JAX and other libraries, the worker, and Python's own.
_LIBRARIES = ("site-packages", "dist-packages", "jax/_src", "tensord/workers", "lib/python3", "<")
#: Operations that call one program once, with their own operands.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
_Reached = frozenset[int]


def examine(model: str, traced: jax.stages.Traced, again: jax.stages.Traced, programs: int) -> list[str]:
    """Checks a model's function for four likely mistakes. Returns a list of four strings: a warning, or "", for each mistake.

    The mistakes are: (1) the same request may have another effect or answer when it runs again, (2) random numbers are the same
    for all requests, (3) the function has large constants, (4) no output depends on some inputs.
    Args:
      traced: the first trace of the function. The function's first two arguments are the parameters and a dict of inputs.
      again: the second trace of the function. If it differs, that is mistake (1). Pass ``traced`` if there is no second trace.
      programs: the number of programs that are compiled from the function. Warning (3) multiplies the constants' size by it.
    Raises Internal if the function uses a value of an earlier trace.
    """
    arguments = [path[1:] for path, _ in jax.tree_util.tree_leaves_with_path(again.args_info)]
    followed = [_Reached([at] if path[0].idx else []) for at, path in enumerate(arguments)]
    # JAX makes a value of another trace an argument before all others.
    foreign, used, found = [_Reached([-1])] * (len(again.jaxpr.in_avals) - len(arguments)), set[int](), [""] * 4
    held: dict[int, tuple[int, str]] = {}
    for chain, operands in steps(again.jaxpr, foreign + followed):
        name = chain[-1].primitive.name if chain else ""
        if any(-1 in reached for reached, _ in operands):
            raise Internal(f"model '{model}': {LEAKED}{line_of(chain)}")
        if name == "io_callback":
            found[0] = (
                f"it calls Python by io_callback{line_of(chain)}, also at load, for rows of padding and again if a worker dies; "
                "jax.pure_callback says that a function has no effects, a host model (host = True) may have some"
            )
        elif name in ("random_bits", "rng_bit_generator") and any(followed) and not operands[0][0]:
            found[1] = (
                f"it draws random numbers with a key that depends on no input{line_of(chain)}, so all requests get the same; "
                "tensord.models.keys makes keys of requests' seeds, and numbers that are to stay are parameters"
            )
        used.update(*(reached for reached, _ in operands if not chain or chain[-1].effects))
        held |= {
            id(value): (value.size * value.dtype.itemsize, line_of(chain)) for _, value in operands if np.ndim(value)
        }
    # Where one ends, it has its results, and no operation.
    for one, other in () if again is traced else zip(steps(traced.jaxpr), steps(again.jaxpr), strict=False):
        if _told(*one) != _told(*other):
            found[0] = (
                f"its function is another one each time that it is traced{line_of(other[0] or one[0])}, as with numpy.random, "
                "the time or a counter, which are constants of one bucket, worker and start: random numbers are jax.random's, "
                "with keys of tensord.models.keys, and what else changes is an input or a parameter"
            )
            break
    if (byte_size := sum(each for each, _ in held.values())) >= _MIN_BYTE_SIZE:
        found[2] = (
            f"its function has {byte_size} bytes of arrays that are no parameters, and each of its {programs} programs has them "
            f"as constants{max(held.values())[1]}: loading takes longer, and memory and cache hold about {byte_size * programs} "
            "bytes more. Return them from create() with the parameters"
        )
    named = [(at, path[1].key) for at, path in enumerate(arguments) if path[0].idx == 1 and len(path) == 2]
    if unused := ", ".join(f"'{name}'" for at, name in named if at not in used):
        found[3] = f"no output depends on its input {unused}: use it, or do not declare it"
    return found


def _told(chain: Sequence[Any], operands: Sequence[tuple[object, Any]]) -> object:
    kinds = [(each.primitive.name, [str(made.aval) for made in each.outvars]) for each in chain[-1:]]
    given = [value for each in chain[-1:] for value in each.params.values()]
    numbers = [value for value in given if all(isinstance(each, (int, float)) for each in jax.tree.leaves(value))]
    return kinds, numbers, [str(value) for _, value in operands]


def line_of(chain: Sequence[Any]) -> str:
    """Returns where an operation stands in the model's code, such as `` (model.py, line 7, in apply)``, or "" if this is unknown.

    ``chain``: nested operations, from the outermost one, such as a loop, to the operation itself.
    """
    tracebacks = [each.source_info.traceback for each in reversed(chain)]
    for frame in [frame for each in tracebacks if each is not None for frame in each.frames]:
        if not any(each in frame.file_name for each in _LIBRARIES):
            function = frame.function_name.rpartition(".")[2]
            return f" ({os.path.basename(frame.file_name)}, line {frame.line_num}, in {function})"
    return ""


def steps(program: Any, arguments: Iterable[_Reached] = repeat(_Reached()), outer: tuple[Any, ...] = ()) -> Any:
    """Yields a pair (chain, operands) for each operation of a JAX program and of the programs nested in it.

    The caller labels the arguments of ``program`` with integers. Each value has the labels of the arguments that it depends on.
    ``chain`` is a tuple: the operations that contain the operation, outermost first, and then the operation itself.
    ``operands`` is a list with a pair (labels, value) for each operand. ``value`` is None unless the operand is a constant.
    After a program's last operation comes one more pair: a tuple of the operations that contain the program, outermost first,
    and a list with a pair (labels, value) for each result of the program.
    Args:
      arguments: the set of labels of each argument of ``program``. By default, no argument has a label.
      outer: the operations that contain ``program``, outermost first. ``chain`` begins with these operations.
    """
    plain: Any = getattr(program, "jaxpr", program)
    held = zip(plain.constvars, getattr(program, "consts", ()), strict=False)
    known = {id(each): (_Reached(), value) for each, value in held}
    known |= {id(each): (reached, None) for each, reached in zip(plain.invars, arguments, strict=False)}

    def operands(atoms: Sequence[Any]) -> list[tuple[_Reached, Any]]:
        return [known.get(id(each), (_Reached(), getattr(each, "val", None))) for each in atoms]

    for equation in plain.eqns:
        chain, taken = (*outer, equation), operands(equation.invars)
        yield chain, taken
        given = [reached for reached, _ in taken]
        made = [_Reached().union(*given)] * len(equation.outvars)
        for inner in filter(lambda each: hasattr(each, "eqns"), jax.tree.leaves([*equation.params.values()])):
            is_call = equation.primitive.name in _CALLS
            results = yield from steps(inner, given if is_call else repeat(_Reached().union(*given)), chain)
            made = results if is_call else made
        known |= {id(each): (reached, None) for each, reached in zip(equation.outvars, made, strict=True)}
    yield outer, (last := operands(plain.outvars))
    return [reached for reached, _ in last]


def leaks(trace: Callable[[], object]) -> bool:
    """Calls ``trace``, which traces a function with JAX. Returns whether the function stored a traced value outside of itself."""
    try:
        with jax.checking_leaks():  # which has inner functions traced again, too
            trace()
    except Exception as error:
        error.__traceback__ = None  # its frames hold values as well
        gc.collect()
        alive = any(issubclass(type(each), jax.core.Tracer) for each in gc.get_objects())
        return alive and str(error).startswith("Leaked ")
    return False
