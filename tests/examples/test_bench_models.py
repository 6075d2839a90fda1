"""The benchmark models do the arithmetic they are compared by."""

from __future__ import annotations

import runpy
from typing import Any

import jax
import numpy as np

from tests.examples.models import ROOT, load


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


def test_writer_goes_on_as_a_text_at_a_time_would() -> None:
    """Computed here a position after the other, as the compared server does it, from the same seed."""
    functions, params = runpy.run_path(str(ROOT / "bench/models/writer/1/model.py"))["create"](None, {}, None)
    init, insert, step = (
        jax.jit(function, static_argnums=(1,) if i == 0 else ()) for i, function in enumerate(functions)
    )
    prompt, count = [7 * i % 256 for i in range(8)], 12
    padded = {
        "prompt": np.array(prompt + [0] * 24, np.int32),
        "length": np.int32(8),
        "count": np.array([count], np.int32),
    }
    carry, outputs, emit, finished = insert(params, init(params, 16), np.int32(2), padded)
    assert (bool(emit), bool(finished)) == (True, False)
    tokens, active = [int(outputs["token"][0])], np.arange(16) == 2
    while not finished:
        carry, outputs, _, over = step(params, carry, active)
        tokens.append(int(outputs["token"][2, 0]))
        finished = bool(over[2])
    # In numpy: JAX would compile every operation anew for every length.
    assert tokens == _greedy(jax.tree.map(np.asarray, params), prompt, count)


def _greedy(params: Any, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        x = params["embedding"][text] + params["positions"][: len(text)]
        for layer in params["layers"]:
            y = _norm(x)
            q, k, v = ((y @ layer[name]).reshape(len(text), 4, 32) for name in "qkv")
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(32)
            weights = np.exp(np.where(np.tri(len(text)), scores, -np.inf))
            weights /= weights.sum(axis=-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(x.shape) @ layer["w"]
            x = x + _gelu(_norm(x) @ layer["a"]) @ layer["b"]
        text.append(int(np.argmax(_norm(x)[-1] @ params["last"])))
    return text[len(prompt) :]


def _gelu(x: Any) -> Any:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def _norm(x: Any) -> Any:
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
