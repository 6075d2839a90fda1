"""Tests which leaves are a program's arguments, and which a part of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tensord.workers.loading.parameters import parted


def apply(parameters: dict[str, object], inputs: dict[str, object]) -> dict[str, object]:
    return {**parameters, **inputs}


def test_arrays_alone_stay_as_they_are() -> None:
    arrays = {"a": np.zeros(2), "b": [jnp.ones(3), np.float32(1)], "none": None}
    assert parted(apply, arrays) == (apply, arrays)
    assert parted(apply, None) == (apply, None)


def test_everything_else_is_closed_over() -> None:
    fixed = {"relu": jax.nn.relu, "flag": False, "count": 3, "rate": 0.5, "name": "x", "thing": object(), "none": None}
    arrays = {"w": np.arange(2.0), "deep": [np.float32(1), jax.nn.gelu, jnp.ones(3)]}
    function, arguments = parted(apply, {**fixed, **arrays})
    assert [np.shape(argument) for argument in arguments] == [(), (3,), (2,)]
    made = function([argument + 1 for argument in arguments], {"x": 1})
    assert {name: made[name] for name in fixed} == fixed
    assert made["x"] == 1
    np.testing.assert_array_equal(made["w"], [1.0, 2.0])
    assert made["deep"][1] is jax.nn.gelu
    np.testing.assert_array_equal(made["deep"][2], [2.0, 2.0, 2.0])
