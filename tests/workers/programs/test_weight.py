"""Tests that a program's weight is read from the program, not measured with a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.workers.programs.weight import Weight, weight_of


def asks_python(x: Any) -> Any:
    return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize(
    ("function", "shape", "weight"),
    [
        (lambda x: x + 1, (1, 16), Weight.TINY),
        (lambda x: jax.nn.relu(x @ x), (16, 16), Weight.TINY),
        (lambda x: jnp.sin(x).sum(), (10_000,), Weight.LIGHT),
        (lambda x: x @ x, (200, 200), Weight.HEAVY),
        (lambda x: x + 1, (1 << 20,), Weight.HEAVY),
        # A loop of any number of iterations is counted as one, and a call as nothing.
        (lambda x: jax.lax.fori_loop(0, 100_000, lambda i, x: x + 1, x), (1, 16), Weight.HEAVY),
        (jnp.linalg.inv, (4, 4), Weight.HEAVY),
        (asks_python, (4,), Weight.HEAVY),
    ],
)
def test_weight(function: Callable[[Any], Any], shape: tuple[int, ...], weight: Weight) -> None:
    assert weight_of(jax.jit(function).lower(jax.ShapeDtypeStruct(shape, np.float32)).compile()) is weight
