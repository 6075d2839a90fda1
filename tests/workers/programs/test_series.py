"""Series: programs for several requests are wished for only where they are missed, quick and small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensord.config.model_config import parse_pbtxt
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


def series(single_ns: int = 60_000) -> Series:
    made = Series(SIGNATURE, apply)
    made.note(request_of(0), single_ns)
    return made


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
    made = series(single_ns=20_000)
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


def test_slow_or_large_runs_go_alone() -> None:
    slow = Series(SIGNATURE, apply)
    slow.note(request_of(0), 5_000_000)
    large = Series(SIGNATURE, apply)
    large.note(made_requests.request_of({"a": np.zeros(1 << 20, np.float32)}, key=KEY), 10_000)
    for made in (slow, large):
        for _ in range(500):
            assert made.find(KEY, 8) is None
        assert made.wish is None


def test_what_becomes_slow_goes_alone_again() -> None:
    made = series()
    made.add(made.compile(SeriesWanted(2, KEY), PLACEMENT))
    assert made.find(KEY, 2) is not None
    for _ in range(50):
        made.note(request_of(0), 10_000_000)
    assert made.find(KEY, 2) is None
