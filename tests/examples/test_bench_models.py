"""The benchmark models do the arithmetic they are compared by."""

from __future__ import annotations

import jax
import numpy as np

from tests.examples.models import load


def test_addsub() -> None:
    _, call = load("bench/models/addsub")
    a, b = np.arange(48, dtype=np.float32).reshape(3, 16), np.full((3, 16), 2, np.float32)
    got = call({"INPUT0": a, "INPUT1": b})
    np.testing.assert_array_equal(got["OUTPUT0"], a + 2)
    np.testing.assert_array_equal(got["OUTPUT1"], a - 2)


def test_identity() -> None:
    _, call = load("bench/models/identity")
    for length in (0, 5, 1000):
        a = np.random.default_rng(length).normal(size=length).astype(np.float32)
        np.testing.assert_array_equal(call({"INPUT0": a})["OUTPUT0"], a)


def test_post() -> None:
    _, call = load("bench/models/post")
    logits = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)
    powers = np.exp(logits)
    expected = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(call({"logits": logits})["probabilities"], expected, rtol=1e-5)


def test_mlp_has_the_weights_of_its_seed() -> None:
    """Computed here with numpy from the seed, with 64-bit types off, as the compared server does it."""
    _, call = load("bench/models/mlp")
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    first, second, third = (
        np.asarray(jax.random.normal(key, shape) * 0.05)
        for key, shape in zip(keys, ((784, 512), (512, 512), (512, 10)), strict=True)
    )
    x = np.random.default_rng(0).normal(size=(4, 784)).astype(np.float32)
    expected = np.maximum(np.maximum(x @ first, 0) @ second, 0) @ third
    got = call({"x": x})["logits"]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_mlp_has_the_same_weights_with_64_bit_types_on() -> None:
    """A worker may call the factory in either mode."""
    x = {"x": np.ones((1, 784), np.float32)}
    expected = load("bench/models/mlp")[1](x)["logits"]
    with jax.enable_x64(True):
        got = load("bench/models/mlp")[1](x)["logits"]
    np.testing.assert_array_equal(got, expected)
