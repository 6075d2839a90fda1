"""Reads programs: if they may be run, how exactly they compute, which operation combines rows, and that their loops end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import io_callback

from tensord.workers.programs.row_reading import MOST_ITERATIONS, combining, ending, read

X = jnp.ones((4, 3))


def traced(function: Any, *arguments: Any) -> Any:
    return jax.make_jaxpr(function)(*(arguments or (X,)))


def calls(x: Any) -> Any:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def checked(x: Any) -> Any:
    """Checks as equinox.error_if does."""
    return jax.jit(lambda x: jax.lax.cond(x.sum() > 0, calls, lambda x: x, x))(x)


def test_programs_that_call_python_that_is_not_pure_are_not_tried() -> None:
    def calls_impure(x: Any) -> Any:
        return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def prints(x: Any) -> Any:
        jax.debug.print("{}", x[0])
        return x

    exported = export.export(jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x - 1, x)))(X)
    for function in (calls_impure, jax.jit(calls_impure), prints, exported.call):
        assert not read(traced(function).jaxpr).may_be_tried
    for function in (jax.jit(jnp.sin), calls, jax.jit(calls), export.export(jax.jit(jnp.sin))(X).call):
        assert read(traced(function).jaxpr).may_be_tried


def test_error_checks_pass() -> None:
    def function(x: Any) -> Any:
        return checked(x) * 2, jax.lax.map(checked, -x)

    program = traced(function)
    assert read(program.jaxpr).checks
    for other in (calls, jax.jit(calls), lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: x, x)):
        assert not read(traced(other).jaxpr).checks
    twice, mapped = ending(program.jaxpr, program.consts, X)
    np.testing.assert_array_equal(twice, 2 * X)
    np.testing.assert_array_equal(mapped, -X)


def test_a_program_is_as_exact_as_its_coarsest_numbers() -> None:
    def narrow(x: Any) -> Any:
        return jax.jit(lambda x: x.astype(jnp.bfloat16) * 2)(x).astype(np.float32) + jax.random.uniform(
            jax.random.key(1)
        )

    assert read(traced(jnp.sin).jaxpr).rounding == 2.0**-23
    assert read(traced(narrow).jaxpr).rounding == 2.0**-7
    assert read(traced(jnp.add, jnp.arange(3), jnp.arange(3)).jaxpr).rounding == 0


def test_the_operation_that_combines_rows_is_told_with_its_line() -> None:
    functions: dict[Callable[[Any], Any], str] = {
        lambda x: x - x.mean(0): "reduce_sum",
        lambda x: jnp.sin(x) @ x.T: "dot_general",
        lambda x: jnp.sort(x, 0): "sort",
        lambda x: jnp.sort(x, 1) + jnp.cumsum(x, 0): "cumsum",
        lambda x: x[::-1]: "rev",
        lambda x: x * x[1]: "slice",
        lambda x: jax.lax.scan(lambda c, one: (c + one, c), jnp.ones(3), x)[1]: "scan",
        lambda x: jax.vmap(lambda one: one - one.mean())(x) - x.argmax(0): "argmax",
    }
    for function, operation in functions.items():
        where = f"test_row_reading.py, line {function.__code__.co_firstlineno}"
        assert combining(traced(function).jaxpr, 4).startswith(f"{operation} ({where}"), operation
    silent = jax.jit(lambda x: (jax.lax.cond(x.sum() > 0, lambda x: (), lambda x: (), x), jnp.sin(x))[1])
    for harmless in (silent, jnp.sin, lambda x: x @ x.T[:, :2].T.T, lambda x: jax.nn.softmax(x) @ jnp.ones((3, 4))):
        assert combining(traced(harmless, jnp.ones((5, 3))).jaxpr, 7) == ""


def test_loops_end() -> None:
    def forever(x: Any) -> Any:
        return jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x + 1, x))(x)

    def nested(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: forever(x) * 1.0, x)

    for function, most in (
        (forever, MOST_ITERATIONS),
        (jax.vmap(forever), MOST_ITERATIONS),
        (nested, MOST_ITERATIONS**2),
    ):
        program = traced(function)
        assert read(program.jaxpr).loops
        (made,) = jax.jit(lambda x, program=program: ending(program.jaxpr, program.consts, x))(X)
        np.testing.assert_array_equal(made, X + most)


def test_a_program_that_ends_by_itself_computes_the_same() -> None:
    def function(x: Any) -> Any:
        y = jax.lax.while_loop(lambda x: jnp.abs(x).sum() > 1, lambda x: jax.nn.relu(x) * 0.7, x)
        return jax.checkpoint(jnp.sin)(y), jax.lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y), jnp.split(y, 2)

    program = traced(function)
    made = ending(program.jaxpr, program.consts, X)
    for one, other in zip(made, jax.tree.leaves(function(X)), strict=True):
        np.testing.assert_allclose(one, other)


def test_loops_in_a_scan_are_not_bounded() -> None:
    def function(x: Any) -> Any:
        return jax.lax.map(lambda x: jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x - 1, x), x)

    program = traced(function)
    with pytest.raises(NotImplementedError):
        ending(program.jaxpr, program.consts, X)
