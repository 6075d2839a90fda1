"""Series: several requests in one call, each computed by itself; wished for only where they are missed, quick and small."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from config.model_config import parse_pbtxt
from tests.workers import requests
from workers.models.series import LENGTHS, Series, SeriesWanted
from workers.models.signature import signature
from workers.request import Request

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


def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    a, b = inputs["a"], inputs["b"]
    return {"sum": parameters["scale"] * a + b.sum(), "largest": a.max(keepdims=True)}


def request_of(seed: int) -> Request:
    rng = np.random.default_rng(seed)
    return requests.request_of({"a": rng.random(3, np.float32), "b": rng.random(2, np.float32)}, key=KEY)


def series() -> Series:
    made = Series(SIGNATURE, apply)
    made.note(KEY, request_of(0).arrays, 20_000)
    return made


def wish_of(made: Series, waiting: int) -> SeriesWanted:
    for _ in range(200):
        assert made.length(KEY, waiting) == 1
        if made.wish is not None:
            break
    wish = made.take_wish()
    assert wish is not None
    assert made.take_wish() is None
    return wish


@pytest.mark.parametrize("length", LENGTHS)
def test_each_request_gets_what_it_would_get_alone(length: int) -> None:
    made, parameters = series(), jax.device_put({"scale": np.float32(3)})
    program = made.compile(SeriesWanted(length, KEY), parameters)
    alone = jax.jit(apply)
    for round_ in range(3):
        waiting = [request_of(100 * round_ + i) for i in range(length)]
        assert program.gather(waiting) == length * 20
        made_of_all = program.run(parameters, tuple(SIGNATURE.outputs))
        assert list(made_of_all) == ["sum", "largest"]
        for i, request in enumerate(waiting):
            expected = alone(parameters, request.arrays)
            for name, values in made_of_all.items():
                assert len(values) == length
                np.testing.assert_array_equal(values[i], np.asarray(expected[name]))


def test_a_program_is_wished_for_when_it_was_missed_often_and_then_used() -> None:
    made = series()
    wish = wish_of(made, 5)
    assert wish == SeriesWanted(4, KEY)
    for _ in range(200):
        assert made.length(KEY, 5) == 1
    assert made.wish is None, "one at a time"
    made.add(made.compile(wish, jax.device_put({"scale": np.float32(1)})))
    assert made.length(KEY, 5) == 4
    assert made.length(KEY, 4) == 4
    assert made.length(KEY, 3) == 1
    assert made.find(KEY, 4) is not None
    assert made.find(KEY, 2) is None


def test_nobody_waits_nothing_is_missed() -> None:
    made = series()
    for _ in range(500):
        assert made.length(KEY, 1) == 1
        assert made.length("another shape", 8) == 1
    assert made.wish is None


def test_slow_or_large_runs_go_alone() -> None:
    slow = Series(SIGNATURE, apply)
    slow.note(KEY, request_of(0).arrays, 5_000_000)
    large = Series(SIGNATURE, apply)
    large.note(KEY, {"a": np.zeros(1 << 20, np.float32)}, 10_000)
    for made in (slow, large):
        for _ in range(500):
            assert made.length(KEY, 8) == 1
        assert made.wish is None


def test_what_becomes_slow_goes_alone_again() -> None:
    made = series()
    made.add(made.compile(SeriesWanted(2, KEY), jax.device_put({"scale": np.float32(1)})))
    assert made.length(KEY, 2) == 2
    for _ in range(50):
        made.note(KEY, {}, 10_000_000)
    assert made.length(KEY, 2) == 1
