"""Tests which shapes are compiled, which one a request goes into, and what is cut off again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.config.model_config import empty
from tensord.shm.errors import InvalidArgument
from tensord.workers.tensors.buckets import Buckets, check_sizes, powers_of_two, sliced
from tensord.workers.tensors.signature import Signature, declare, parse_declaration, signature


def of(inputs: dict[str, str], max_batch_size: int = 8) -> Signature:
    message = empty("m")
    message.max_batch_size = max_batch_size
    declared = {name: parse_declaration(name, text) for name, text in inputs.items()}
    declare(message, declared, {})
    return signature(message, {name: each.axes for name, each in declared.items()}, {})


@pytest.mark.parametrize(
    ("limit", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (33, (1, 2, 4, 8, 16, 32, 33))]
)
def test_powers_of_two(limit: int, sizes: tuple[int, ...]) -> None:
    assert powers_of_two(limit) == sizes


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1), (1.0,), "12", 4, None, (True,)])
def test_bad_sizes(sizes: object) -> None:
    with pytest.raises(InvalidArgument, match="buckets"):
        check_sizes("buckets", sizes)


def test_planned_is_every_combination() -> None:
    buckets = Buckets(
        of({"ids": "INT32[s]", "mask": "INT32[s, k]", "w": "FP32[3]"}), (1, 8), {"s": (16, 32), "k": (4,)}
    )
    assert list(buckets.planned()) == [
        (rows, shapes) for shapes in (((16,), (16, 4), (3,)), ((32,), (32, 4), (3,))) for rows in (1, 8)
    ]
    assert not buckets.fixed


def test_nothing_is_planned_for_an_axis_without_buckets() -> None:
    assert list(Buckets(of({"x": "FP32[n]"}), (1,), {}).planned()) == []
    assert list(Buckets(of({"x": "FP32[n, m]"}), (1,), {"n": (4,)}).planned()) == []
    assert list(Buckets(of({"x": "FP32[7]"}), (1,), {}).planned()) == [(1, ((7,),))]


@given(st.integers(1, 64), st.integers(0, 300))
def test_a_bucket_holds_what_goes_into_it(rows: int, length: int) -> None:
    made = of({"x": "FP32[s]"}, 64)
    buckets = Buckets(made, powers_of_two(64), {"s": (16, 64, 256)})
    assert rows <= buckets.rows(rows) < 2 * rows
    (padded,) = buckets.padded(made.inputs["x"], (length,))
    assert padded >= length
    assert padded in (16, 64, 256) or padded == length > 256


def test_slices() -> None:
    spec = of({"x": "FP32[s, 3, t]"}).inputs["x"]
    assert sliced(spec, (16, 3, 8), {"s": 5, "t": 8}) == (slice(None, 5), slice(None), slice(None))
