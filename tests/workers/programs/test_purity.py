"""Examines traced programs: of functions that are not what they seem, and of functions that are as they should be."""

from __future__ import annotations

import inspect
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from tensord.shm.errors import Internal
from tensord.workers.programs.purity import examine, leaks

Function = Callable[[Any, Any], Any]
OF_INPUT = jax.ShapeDtypeStruct((2, 4), np.float32)
PARAMETERS = {"key": jax.eval_shape(lambda: jax.random.key(0)), "w": jax.ShapeDtypeStruct((4,), np.float32)}
LARGE = np.ones((1 << 18) + 4, np.float32)
numbers = itertools.count()
kept: list[Any] = []


def found_in(function: Function, fresh: bool = True) -> list[str]:
    """Examines a function of a parameter and two inputs. ``fresh``: it is traced a second time."""

    def traced() -> jax.stages.Traced:
        jitted: Any = jax.jit(lambda parameters, inputs: function(parameters, inputs))
        made: jax.stages.Traced = jitted.trace(
            PARAMETERS, {"x": OF_INPUT, "seed": jax.ShapeDtypeStruct((2,), np.int32)}
        )
        return made

    first = again = traced()
    if fresh:
        with jax.default_device(jax.local_devices()[0]):
            again = traced()
    return examine("m", first, again, 3)


def normal(key: Any, inputs: Any) -> Any:
    return inputs["x"] + inputs["seed"][:, None] + jax.random.normal(key, inputs["x"].shape)


def looped(parameters: Any, inputs: Any) -> Any:
    def go_on(carry: Any, seed: Any) -> Any:
        key, total = carry
        return (jax.random.fold_in(key, seed), total + jax.random.uniform(key)), total

    _, drawn = jax.lax.scan(go_on, (jax.random.key(0), 0.0), inputs["seed"])
    return {"y": inputs["x"] * drawn[:, None]}


@jax.jit
def jitted_by_its_author(parameters: Any, inputs: Any) -> Any:
    return {"y": inputs["x"] + inputs["seed"][:, None] * random.random()}  # here


@jax.jit
def large(parameters: Any, inputs: Any) -> Any:
    return {"y": inputs["x"] * LARGE[:4] + inputs["seed"][:, None] + (LARGE * inputs["x"][0, 0])[7]}  # here


@jax.custom_jvp
def softened(x: Any) -> Any:
    return jnp.median(jax.nn.gelu(x), axis=1, keepdims=True) + x


softened.defjvp(lambda primals, tangents: (softened(*primals), tangents[0]))


def rows(inputs: Any) -> Any:
    return inputs["x"] + inputs["seed"][:, None]


OTHERWISE = [
    lambda p, i: {"y": rows(i) + np.random.rand()},  # here
    lambda p, i: {"y": rows(i) * np.random.normal(size=(2, 4)).astype(np.float32)},  # here
    lambda p, i: {"y": rows(i) + time.perf_counter() % 1},  # here
    lambda p, i: {"y": rows(i) * next(numbers)},  # here
    lambda p, i: {"y": jnp.roll(rows(i), next(numbers) % 7)},  # here
    lambda p, i: {"y": rows(i)[:, next(numbers) % 2 :][:, :2]},  # here
    lambda p, i: {"y": rows(i) + 1 if next(numbers) % 2 else jnp.sin(rows(i)) + 1},  # here
    lambda p, i: {"y": jax.lax.cond(i["x"][0, 0] > 0, lambda x: x, lambda x: x + np.random.rand(), rows(i))},  # here
    lambda p, i: {"y": (jnp.sin if next(numbers) % 2 else jnp.cos)(rows(i))},  # here
    lambda p, i: {"y": rows(i).astype("bfloat16" if next(numbers) % 2 else "float16").astype(np.float32)},  # here
    lambda p, i: {"y": jax.lax.slice(rows(i), (0, at := next(numbers) % 2), (2, at + 2))},  # here
    jitted_by_its_author,
]


@pytest.mark.parametrize("function", OTHERWISE, ids=range(len(OTHERWISE)))
def test_what_changes_from_trace_to_trace_is_told_with_its_line(function: Function) -> None:
    impure, *others = found_in(function)
    lines, number = inspect.getsourcelines(inspect.unwrap(function))
    number += next(at for at, line in enumerate(lines) if "# here" in line)
    assert impure.startswith(
        f"its function is another one each time that it is traced (test_purity.py, line {number}, in "
    )
    assert "tensord.models.keys" in impure
    assert others == ["", "", ""]
    assert found_in(function, fresh=False) == [""] * 4


@pytest.mark.parametrize("first", [0, 1])
def test_an_operation_that_one_trace_has_at_its_end(first: int) -> None:
    traces = itertools.count(first)

    def function(parameters: Any, inputs: Any) -> Any:
        y = rows(inputs)
        return {"y": jnp.sin(y) if next(traces) == 1 else y}

    line = inspect.getsourcelines(function)[1] + 2
    (impure, *_) = found_in(function)
    assert f"each time that it is traced (test_purity.py, line {line}, in function)" in impure


def test_a_result_that_changes_and_no_operation() -> None:
    impure, _, _, unused = found_in(lambda p, i: {"y": np.random.normal(size=4)})
    assert impure.startswith("its function is another one each time that it is traced, as with numpy.random")
    assert unused == "no output depends on its input 'seed', 'x': use it, or do not declare it"


DRAWN = [
    lambda p, i: {"y": normal(jax.random.key(0), i)},
    lambda p, i: {"y": normal(jax.random.PRNGKey(7), i)},
    lambda p, i: {"y": normal(jax.random.fold_in(jax.random.key(0), 3), i)},
    lambda p, i: {"y": normal(p["key"], i)},
]


@pytest.mark.parametrize("function", DRAWN, ids=range(len(DRAWN)))
def test_keys_that_no_input_reaches(function: Function) -> None:
    line = inspect.getsourcelines(normal)[1] + 1
    impure, drawn, *others = found_in(function)
    assert [impure, *others] == ["", "", ""]
    assert drawn.startswith(
        f"it draws random numbers with a key that depends on no input (test_purity.py, line {line}, in normal), so all"
    )


def test_bits_of_the_devices_own_generator() -> None:
    def function(parameters: Any, inputs: Any) -> Any:
        _, bits = jax.lax.rng_bit_generator(jnp.zeros(4, np.uint32), (2, 4))
        return {"y": rows(inputs) + bits}

    assert found_in(function)[1].startswith(
        "it draws random numbers with a key that depends on no input (test_purity.py"
    )


def test_functions_that_take_other_arguments() -> None:
    """A stepped model's initial state has no inputs, so random numbers in it are not told; a step takes an array, and no dict."""
    begins: Any = jax.jit(lambda parameters: jax.random.normal(jax.random.key(0), (4,)))
    steps: Any = jax.jit(lambda parameters, active: jnp.ones(4))
    for traced in (begins.trace(PARAMETERS), steps.trace(PARAMETERS, OF_INPUT)):
        assert examine("m", traced, traced, 3) == [""] * 4


def test_python_that_is_not_said_to_be_pure() -> None:
    impure, *others = found_in(lambda p, i: {"y": io_callback(np.asarray, OF_INPUT, rows(i))})
    assert impure.startswith("it calls Python by io_callback (test_purity.py, line ")
    assert "jax.pure_callback says that a function has no effects" in impure
    assert others == ["", "", ""]


def test_large_constants_also_of_inner_functions() -> None:
    lines, number = inspect.getsourcelines(inspect.unwrap(large))
    _, _, held, _ = found_in(large)
    assert held.startswith(
        f"its function has {LARGE.nbytes + 16} bytes of arrays that are no parameters, and each of its 3"
    )
    assert f"as constants (test_purity.py, line {number + len(lines) - 1}, in large)" in held


def test_the_largest_constant_is_told_and_each_counts_once() -> None:
    def function(parameters: Any, inputs: Any) -> Any:
        x = inputs["x"] + inputs["seed"][:, None] + np.arange(4)
        twice = LARGE * x[0, 0], jnp.asarray(LARGE) + x[0, 0]
        return {"y": x * np.arange(8).reshape(2, 4) + twice[0].sum() + twice[1].sum()}

    (_, _, held, _) = found_in(function)
    line = inspect.getsourcelines(function)[1] + 2
    assert f"has {LARGE.nbytes + 48} bytes" in held
    assert f"as constants (test_purity.py, line {line}, in function)" in held


def first(x: Any, seed: Any) -> Any:
    return jnp.sin(x)


own_jvp, own_vjp = jax.custom_jvp(first), jax.custom_vjp(first)
own_jvp.defjvp(lambda primals, tangents: (first(*primals), tangents[0]))
own_vjp.defvjp(lambda x, seed: (first(x, seed), None), lambda _, given: (given, None))


@pytest.mark.parametrize("inner", [first, jax.jit(first), jax.checkpoint(first), own_jvp, own_vjp], ids=range(5))
def test_an_input_that_means_nothing(inner: Callable[[Any, Any], Any]) -> None:
    found = found_in(lambda p, i: {"y": inner(i["x"], i["seed"].astype(np.float32))})
    assert found == ["", "", "", "no output depends on its input 'seed': use it, or do not declare it"]


GOOD = [
    lambda p, i: {"y": rows(i) * p["w"]},
    lambda p, i: {"y": softened(rows(i)), "z": jax.checkpoint(jnp.sin)(i["x"])},
    lambda p, i: {"y": jax.vmap(lambda s, x: x + jax.random.normal(jax.random.key(s), (4,)))(i["seed"], i["x"])},
    lambda p, i: {"y": normal(jax.random.fold_in(jax.random.key(0), i["seed"][0]), i)},
    lambda p, i: {"y": normal(jax.random.fold_in(p["key"], i["seed"][0]), i)},
    lambda p, i: {"y": jax.pure_callback(np.asarray, OF_INPUT, rows(i))},
    lambda p, i: (jax.debug.print("{}", i["seed"]), {"y": i["x"]})[1],
    lambda p, i: {"y": jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + i["seed"].sum(), i["x"])},
    lambda p, i: {"y": rows(i) @ np.full((4, 4), np.nan, np.float32)},
    looped,
]


@pytest.mark.parametrize("function", GOOD, ids=range(len(GOOD)))
def test_nothing_is_said_of_what_is_good(function: Function) -> None:
    assert found_in(function) == [""] * 4


def test_a_value_of_an_earlier_trace_that_is_used() -> None:
    kept.clear()

    def function(parameters: Any, inputs: Any) -> Any:
        kept.append(rows(inputs))
        return {"y": rows(inputs) + kept[0]}

    line = inspect.getsourcelines(function)[1] + 2
    try:
        with pytest.raises((Internal, jax.errors.UnexpectedTracerError)) as caught:
            found_in(function)
        if isinstance(caught.value, Internal):
            assert caught.value.message.startswith(
                "model 'm': a value of one trace of the function is kept outside of it"
            )
            assert caught.value.message.endswith(f"(test_purity.py, line {line}, in function)")
    finally:
        kept.clear()


def test_values_that_inner_functions_leave_outside() -> None:
    """Inner functions that JAX has traced before are examined, too."""
    inner = jax.jit(lambda x: kept.append(x * 2) or x + 1)
    try:
        for _ in range(2):
            function = jax.jit(lambda x: inner(x) * 2)
            assert leaks(lambda: function.trace(OF_INPUT))  # noqa: B023
            kept.clear()
    finally:
        kept.clear()
    assert not leaks(lambda: jax.jit(lambda x: softened(x) * 2).trace(OF_INPUT))


def test_values_that_are_used_and_not_left() -> None:
    """JAX's own check takes a function with a derivative of its own, over a value of the trace, for one that leaves it."""

    def function(x: Any) -> Any:
        own = jax.custom_jvp(lambda y: jnp.sin(y) * x.sum())
        own.defjvp(lambda primals, tangents: (own(*primals), tangents[0] * x.sum()))
        return own(x)

    assert not leaks(lambda: jax.jit(function).trace(OF_INPUT))
