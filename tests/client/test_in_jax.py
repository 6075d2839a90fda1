"""A served model inside of jitted programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensord_client

from tests import run_folder
from tests.repositories import applying, scale_model, write_model


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tensord_client.Client]:
    repository: Path = scale_model(tmp_path_factory.mktemp("models"))
    write_model(
        repository,
        "pair",
        applying(
            'return {"y": inputs["a"] * np.float32(inputs["b"][0]), "n": np.arange(inputs["b"][0], dtype=np.int32)}',
            "a FP32[2], b INT32[1]",
            "y FP32[2], n INT32[n]",
            more="host = True",
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())
        with tensord_client.connect(repository) as client:
            yield client


def test_jit_and_scan(client: tensord_client.Client) -> None:
    scale = tensord_client.jax(client.model("scale"))

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        return 2 * scale({"x": x + 1})["y"]

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(program(x), 2 * (3 * (x + 1) + 1))

    def step(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        made = scale({"x": carry})["y"]
        return made, made.sum()

    last, sums = jax.jit(lambda x: jax.lax.scan(step, x, None, 3))(x)
    np.testing.assert_array_equal(last, 27 * x + 13)
    assert sums.shape == (3,)


def test_vmap_goes_into_the_batch(client: tensord_client.Client) -> None:
    """A batch that is larger than one request may be is split: the model has batches of eight."""
    scale = tensord_client.jax(client.model("scale"))
    x = np.arange(5 * 6 * 3 * 4, dtype=np.float32).reshape(5, 6, 3, 4)
    got = jax.jit(jax.vmap(jax.vmap(lambda x: scale({"x": x})["y"])))(x)
    np.testing.assert_array_equal(got, 3 * x + 1)


def test_vmap_of_a_model_without_a_batch(client: tensord_client.Client) -> None:
    pair = tensord_client.jax(client.model("pair"), shapes={"n": (3,)})
    a = jnp.arange(8, dtype=jnp.float32).reshape(4, 2)
    b = jnp.full((1,), 3, jnp.int32)
    got = jax.jit(jax.vmap(lambda a, b: pair({"a": a, "b": b}), in_axes=(0, None)))(a, b)
    np.testing.assert_array_equal(got["y"], 3 * a)
    np.testing.assert_array_equal(got["n"], [[0, 1, 2]] * 4)


def test_a_shape_that_is_not_known(client: tensord_client.Client) -> None:
    pair = tensord_client.jax(client.model("pair"))
    with pytest.raises(tensord_client.InvalidArgument, match=r"output 'n' is INT32\[-1\]: a program needs its shape"):
        jax.jit(lambda a: pair({"a": a, "b": [3]}))(jnp.ones(2))


@pytest.mark.parametrize(
    ("b", "text"),
    [
        ([1.7], "1.7 would become 1"),
        (np.array([1 << 40]), "1099511627776 would become 0"),
        (jnp.array([1.7]), "would become 1"),
        (jnp.array([-3e9]), "would become"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_values_that_would_become_others(client: tensord_client.Client, b: Any, text: str, jitted: bool) -> None:
    """What is known while JAX traces is refused then, the rest when the program runs."""
    pair = tensord_client.jax(client.model("pair"), shapes={"n": (3,)})
    error = jax.errors.JaxRuntimeError if isinstance(b, jax.Array) else tensord_client.InvalidArgument

    def program(a: jax.Array) -> dict[str, jax.Array]:
        return pair({"a": a, "b": b})

    with pytest.raises(error, match=f"input 'b' cannot be an array of INT32: .*{text}"):
        jax.block_until_ready((jax.jit(program) if jitted else program)(jnp.ones(2)))


def test_values_of_another_type_that_stay_what_they_are(client: tensord_client.Client) -> None:
    pair = tensord_client.jax(client.model("pair"), shapes={"n": (3,)})
    for a, b in (([1, 2], [3.0]), (np.array([1, 2]), np.array([3])), (jnp.array([1, 2]), jnp.array([3.0]))):
        got = jax.jit(lambda a, b: pair({"a": a, "b": b}))(a, b) if isinstance(a, jax.Array) else pair({"a": a, "b": b})
        np.testing.assert_array_equal(got["y"], [3, 6])
