"""Series: programs for several requests are made at load, and wished for only where they are missed, light and small."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.config.model_config import parse_pbtxt
from tensord.workers.programs.executables import Apply
from tensord.workers.programs.placement import Placement
from tensord.workers.programs.series import LENGTHS, Series
from tensord.workers.programs.series_program import SeriesProgram, SeriesWanted
from tensord.workers.requests.request import Request
from tensord.workers.tensors.signature import signature
from tests.workers import made_requests

SIGNATURE = signature(
    parse_pbtxt(
        """name: "m"
        input { name: "a" data_type: TYPE_FP32 dims: [ -1 ] }
        input { name: "b" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "sum" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "largest" data_type: TYPE_FP32 dims: [ 1 ] }""",
        "m",
    ),
    {},
    {},
)
KEY = ((3,), (2,))
PLACEMENT = Placement({"scale": np.float32(3)})


def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    a, b = inputs["a"], inputs["b"]
    return {"sum": parameters["scale"] * a + b.sum(), "largest": a.max(keepdims=True)}


def request_of(seed: int) -> Request:
    rng = np.random.default_rng(seed)
    return made_requests.request_of({"a": rng.random(3, np.float32), "b": rng.random(2, np.float32)}, key=KEY)


def light(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with about as much to do as a call costs."""
    made = apply(parameters, inputs)
    square = jnp.outer(jnp.arange(100.0), jnp.arange(100.0)) + inputs["b"].sum()
    return made | {"largest": made["largest"] + 0 * jnp.sin(square).sum(keepdims=True)[0]}


def single(of: Apply = apply, key: Any = KEY) -> Any:
    """The program for one request of that shape."""
    given = {name: PLACEMENT.spec(shape, np.dtype(np.float32)) for name, shape in zip("ab", key, strict=True)}
    return PLACEMENT.compile(jax.jit(of).lower(PLACEMENT.parameter_specs, given))


def series(of: Apply = light) -> Series:
    return Series(SIGNATURE, of, {KEY: single(of)}.get)  # type: ignore[arg-type]


def with_program(made: Series, length: int) -> SeriesProgram:
    program = made.compile(SeriesWanted(length, KEY), PLACEMENT)
    made.add(program)
    return program


def wish_of(made: Series, waiting: int) -> SeriesWanted:
    for _ in range(200):
        assert made.find(KEY, waiting) is None
        if made.wish is not None:
            break
    wish = made.take_wish()
    assert wish is not None
    assert made.take_wish() is None
    return wish


def test_a_program_is_wished_for_when_it_was_missed_often_and_then_used() -> None:
    made = series()
    wish = wish_of(made, 5)
    assert wish == SeriesWanted(4, KEY)
    for _ in range(200):
        assert made.find(KEY, 5) is None
    assert made.wish is None, "one at a time"
    four = made.compile(wish, PLACEMENT)
    made.add(four)
    assert [made.find(KEY, waiting) for waiting in (5, 4, 3)] == [four, four, None]
    assert wish_of(made, 1) == SeriesWanted(1, KEY)
    one = with_program(made, 1)
    assert [made.find(KEY, waiting) for waiting in (5, 4, 3, 1)] == [four, four, one, one]


@pytest.mark.parametrize("order", [LENGTHS, LENGTHS[::-1]])
def test_the_longest_that_is_ready_for_those_who_wait(order: tuple[int, ...]) -> None:
    made = series()
    for length in order:
        made.add(made.compile(SeriesWanted(length, KEY), PLACEMENT))
    lengths = [0 if program is None else program.wanted.length for program in [made.find(KEY, n) for n in range(12)]]
    assert lengths == [0, 1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8]
    for _ in range(500):
        assert made.find(KEY, 11) is not None
    assert made.wish is None


def test_tiny_requests_rather_share_a_series_that_is_not_full() -> None:
    made = series(apply)
    wish = wish_of(made, 5)
    assert wish.length == 8
    for length in LENGTHS:
        made.add(made.compile(SeriesWanted(length, KEY), PLACEMENT))
    lengths = [0 if program is None else program.wanted.length for program in [made.find(KEY, n) for n in range(12)]]
    # Three are not worth one of four: with so few in flight, two batches keep client, front and worker busy at a time.
    assert lengths == [0, 1, 2, 2, 4, 8, 8, 8, 8, 8, 8, 8]


def test_a_shorter_one_is_used_while_a_longer_one_is_missed() -> None:
    made = series()
    two = made.compile(SeriesWanted(2, KEY), PLACEMENT)
    made.add(two)
    for _ in range(200):
        assert made.find(KEY, 9) is two
    assert made.take_wish() == SeriesWanted(8, KEY)


def test_what_was_never_run_alone_is_not_missed() -> None:
    """And once there is a program for one, nobody who comes alone misses another."""
    made = series()
    one = with_program(made, 1)
    for _ in range(500):
        assert made.find(KEY, 1) is one
        assert made.find("another shape", 8) is None
    assert made.wish is None


def looping(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    made = apply(parameters, inputs)
    return made | {"sum": jax.lax.fori_loop(0, 5, lambda i, x: x + 1, made["sum"])}


def multiplying(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    square = jnp.outer(jnp.arange(200.0), jnp.arange(200.0)) + inputs["b"].sum()
    made = apply(parameters, inputs)
    return made | {"sum": made["sum"] + (square @ square).sum()}


@pytest.mark.parametrize("of", [looping, multiplying])
def test_what_has_much_to_do_or_nobody_knows_how_much_goes_alone(of: Apply) -> None:
    made = series(of)
    for _ in range(500):
        assert made.find(KEY, 8) is None
    assert made.wish is None
    assert not made.shares(KEY)


def test_large_inputs_go_alone() -> None:
    key = ((1 << 20,), (2,))
    made = Series(SIGNATURE, apply, {key: single(key=key)}.get)  # type: ignore[arg-type]
    for _ in range(500):
        assert made.find(key, 8) is None
    assert made.wish is None


def test_shapes_that_are_known_at_load_have_their_programs_then() -> None:
    made = series()
    assert made.ready(KEY, 1) is None
    made.prepare([KEY], lambda shapes: PLACEMENT)
    ready = [made.ready(KEY, waiting) for waiting in range(1, 9)]
    assert [program and program.wanted.length for program in ready] == [1, 2, 2, 4, 4, 4, 4, 8]
    for _ in range(500):
        assert made.find(KEY, 3) is ready[2]
    assert made.wish is None


def test_shapes_that_are_known_at_load_are_not_forgotten_for_others() -> None:
    program = single(apply)
    made = Series(SIGNATURE, apply, lambda shapes: program)
    made.prepare([KEY], lambda shapes: PLACEMENT)
    for length in range(100):
        assert made.find(((4 + length,), (2,)), 1) is None
    assert made.ready(KEY, 8) is not None
    assert "33 shapes" not in repr(made), "others are bounded"


def test_a_shape_without_a_program_is_not_known_yet() -> None:
    programs: dict[Any, Any] = {}
    made = Series(SIGNATURE, apply, programs.get)
    assert not made.shares(KEY)
    programs[KEY] = single()
    assert made.shares(KEY)
