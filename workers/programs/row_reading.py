"""Finds out facts about traced programs, for a test whether the rows of a batch affect each other.

The facts are whether a program may be run on generated inputs, how large its rounding errors are, and which of its operations
combine rows of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.extend import core

from tensord.workers.programs.purity import line_of, steps

#: The most iterations of a loop whose end depends on values, which might never come with inputs that no client would send.
MOST_ITERATIONS = 100
#: Operations that call foreign code, or Python that is not declared pure, which may do harm with such inputs.
_UNTRIED = re.compile("(?<!pure_)callback|ffi_call|custom_call|pallas")


class Reading(NamedTuple):
    """Facts about a program that JAX has traced, for example whether the program has loops."""

    may_be_tried: bool
    #: Whether it has ``while`` loops.
    loops: bool
    #: Whether it has error checks, such as those of ``equinox.error_if``.
    checks: bool
    #: The relative rounding error of the coarsest floating-point numbers that it computes.
    rounding: float


def read(program: Any) -> Reading:
    """Analyses a Jaxpr without running it. Returns facts such as whether it is safe to run the Jaxpr on generated inputs."""
    equations, finfo = [chain[-1] for chain, _ in steps(program) if chain], cast("Any", jnp.finfo)
    exported = [each.params["exported"].mlir_module_serialized for each in equations if "exported" in each.params]
    names = {each.primitive.name for each in equations}
    dtypes = {getattr(each.aval, "dtype", jnp.dtype(bool)) for equation in equations for each in equation.outvars}
    rounding = [float(finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    untried = program.effects or any(map(_UNTRIED.search, names)) or any(b"while" in each for each in exported)
    checks = any(_passed(each) is not None for each in equations)
    return Reading(not untried, "while" in names, checks, max(rounding, default=0.0))


def _passed(equation: Any) -> Any:
    branches = equation.params.get("branches", ())
    calls = any(chain and "callback" in chain[-1].primitive.name for each in branches for chain, _ in steps(each))
    return next((each for each in branches if calls and not each.eqns), None)


def combining(program: Any, rows: int) -> str:
    """Returns the first operation of ``program``, a jaxpr, that seems to combine a batch's rows, and the operation's code line.

    Returns "" if there is no such operation. An array has rows if the array's first axis has ``rows`` elements.
    """
    for chain, _ in steps(program):
        if chain and _combines(chain[-1], rows):
            # A library's program keeps the lines of its first caller: the outermost operation's are those of this one.
            return f"{chain[-1].primitive.name}{line_of(chain[:1]) or line_of(chain)}"
    return ""


def _combines(equation: Any, rows: int) -> bool:
    name, params = equation.primitive.name, equation.params
    before, after = ([getattr(each.aval, "shape", ()) for each in them] for them in (equation.invars, equation.outvars))
    if not any(shape[:1] == (rows,) for shape in before):
        return False
    if name == "dot_general":
        gone, shared = params["dimension_numbers"]
        free = [{*range(len(shape))} - {*one, *two} for shape, one, two in zip(before, gone, shared, strict=True)]
        both = all(any(shape[at] == rows for at in axes) for shape, axes in zip(before, free, strict=True))
        return both or any(shape[:1] == (rows,) and 0 in axes for shape, axes in zip(before, gone, strict=True))
    if name in ("slice", "dynamic_slice", "gather"):
        return before[0][:1] == (rows,) and after[0][:1] != (rows,)
    along = [params.get(each) for each in ("axes", "axis", "dimension", "dimensions")]
    return any(0 in each if isinstance(each, tuple) else each == 0 for each in along) or params.get("length") == rows


def ending(program: Any, consts: Sequence[Any], *given: Any) -> list[Any]:
    """Computes the outputs of a jaxpr, but ends long ``while`` loops early. JAX traces this function.

    A ``while`` loop ends after ``MOST_ITERATIONS`` iterations with the values it then has. Checks that raise errors are left out.
    ``program``: the jaxpr. ``consts``, ``given``: the jaxpr's constants and arguments.
    Raises NotImplementedError if an operation such as ``scan`` or ``cond`` has a ``while`` loop inside.
    """
    known = dict(zip((*program.constvars, *program.invars), (*consts, *given), strict=True))

    def values(atoms: Sequence[Any]) -> list[Any]:
        return [each.val if isinstance(each, core.Literal) else known[each] for each in atoms]

    for equation in program.eqns:
        own = [*{each: None for each in equation.invars if not isinstance(each, core.Literal)}]
        alone = program.replace(constvars=[], invars=own, outvars=equation.outvars, eqns=[equation])
        name, found = equation.primitive.name, read(alone)
        inner = [each for each in equation.params.values() if hasattr(each, "eqns") and name != "scan"]
        if name == "while":
            made = _ended(equation.params, values(equation.invars))
        elif (passed := _passed(equation)) is not None:
            made = core.jaxpr_as_fun(passed)(*values(equation.invars[1:]))
        elif len(inner) == 1 and (found.loops or found.checks):
            plain: Any = getattr(inner[0], "jaxpr", inner[0])
            made = ending(plain, getattr(inner[0], "consts", ()), *values(equation.invars))
        elif found.loops:
            raise NotImplementedError(name)
        else:
            made = core.jaxpr_as_fun(core.ClosedJaxpr(alone, []))(*values(own))
        known.update(zip(equation.outvars, made, strict=True))
    return values(program.outvars)


def _ended(params: Any, operands: list[Any]) -> list[Any]:
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]

    def more(carry: tuple[Any, list[Any]]) -> Any:
        return ending(condition.jaxpr, condition.consts, *operands[:first], *carry[1])[0]

    def step(carry: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        made, goes_on = ending(body.jaxpr, body.consts, *operands[first:second], *carry[1]), more(carry)
        # Under ``vmap`` each row has an end of its own.
        goes_on = [jax.lax.broadcast_in_dim(goes_on, old.shape, range(goes_on.ndim)) for old in carry[1]]
        return carry[0] + 1, list(map(jax.lax.select, goes_on, made, carry[1]))

    def unfinished(carry: tuple[Any, list[Any]]) -> Any:
        return (carry[0] < MOST_ITERATIONS) & more(carry).any()

    return list(jax.lax.while_loop(unfinished, step, (0, operands[second:]))[1])
