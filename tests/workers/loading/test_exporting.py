"""A function, and a model.py, written as a version without Python: what is written answers as what it was written from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from google.protobuf import text_format

import tensord.models
from tensord import testing
from tensord.config.model_config import empty
from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations import artifact
from tests import run_folder

INPUTS = {"x": "FP32[width]", "scale": "FP32[1]"}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())


def pooled(params: Any, inputs: Any) -> Any:
    x = params["activation"](inputs["x"] * params["factors"][0]) * inputs["scale"]
    if x.shape[1] > 64:
        raise ValueError("too wide")
    return {"mean": x.mean(axis=-1), "y": x}


PARAMETERS = {"factors": [np.float32(3), np.ones(2, np.float32)], "activation": jnp.tanh}


def read(folder: Path) -> Any:
    message = empty()
    text_format.Parse((folder / "config.pbtxt").read_text(), message)
    return artifact.module(folder / "1", message, "cpu"), message


def test_a_function(tmp_path: Path) -> None:
    folder = tensord.models.export(tmp_path / "m", pooled, PARAMETERS, INPUTS, 8, {"width": (16, 64)}, ("cpu", "cuda"))
    module, message = read(folder)
    assert (message.name, message.max_batch_size) == ("m", 8)
    assert {tensor.name: list(tensor.dims) for tensor in message.input} == {"x": [-1], "scale": [1]}
    assert {tensor.name: list(tensor.dims) for tensor in message.output} == {"mean": [], "y": [-1]}
    assert message.parameters["buckets.width"].string_value == "16,64"
    assert module.inputs == {"scale": "FP32[1]", "x": "FP32[width]"}
    apply, params = module.create(folder / "1", {}, jax.devices()[0])
    assert sorted(params) == ["factors.0", "factors.1"]
    for rows, width in ((1, 16), (8, 5)):
        given = {
            "x": np.random.default_rng(rows).random((rows, width), np.float32),
            "scale": np.full((rows, 1), 2, np.float32),
        }
        made, expected = jax.jit(apply)(params, given), pooled(PARAMETERS, given)
        np.testing.assert_allclose(made["y"], expected["y"], rtol=1e-6)
        np.testing.assert_allclose(made["mean"], expected["mean"], rtol=1e-6)


def test_a_function_of_trees(tmp_path: Path) -> None:
    """Names are those that it has when it is served from a model.py."""
    tree = {"pair": ("FP32[2]", {"b": "FP32[1]"})}

    def apply(params: Any, inputs: Any) -> Any:
        a, rest = inputs["pair"]
        return [a * params, {"b": rest["b"]}]

    folder = tensord.models.export(tmp_path / "m", apply, np.float32(3), tree, 4)
    module, message = read(folder)
    assert sorted(module.inputs) == ["pair.0", "pair.1.b"]
    assert sorted(tensor.name for tensor in message.output) == ["1.b", "output_0"]
    served, params = module.create(folder / "1", {}, jax.devices()[0])
    made = served(params, {"pair.0": np.ones((2, 2), np.float32), "pair.1.b": np.ones((2, 1), np.float32)})
    np.testing.assert_array_equal(made["output_0"], np.full((2, 2), 3, np.float32))


def test_a_wide_one_without_parameters_and_without_a_batch(tmp_path: Path) -> None:
    folder = tensord.models.export(
        tmp_path / "m", lambda _, inputs: {"y": inputs["x"] + 1}, None, {"x": "INT64[-1, 2]"}
    )
    module, _ = read(folder)
    apply, params = module.create(folder / "1", {}, jax.devices()[0])
    with jax.enable_x64(True):
        made = np.asarray(jax.jit(apply)(params, {"x": np.full((3, 2), 1 << 40)})["y"])
    assert made.dtype == np.int64
    assert made[0, 0] == (1 << 40) + 1
    assert not (folder / "1" / "params.safetensors").exists()


@pytest.mark.parametrize("wide", [False, True])
def test_parameters_of_64_bits_are_computed_with_as_where_they_are_exported(tmp_path: Path, wide: bool) -> None:
    """Without 64-bit types JAX takes them as 32 bits, and they are written so."""
    with jax.enable_x64(wide):
        folder = tensord.models.export(
            tmp_path / "m",
            lambda params, inputs: {"y": (inputs["x"] + params["w"]).astype(np.float32), "w": params["w"]},
            {"w": np.array([1 + 2**-40])},
            {"x": "FP32[1]"},
        )
    with testing.load(folder) as model:
        made = model({"x": np.ones(1, np.float32)})
    assert made["y"].tolist() == [2]
    assert (made["w"].dtype, made["w"].tolist()) == ((np.float64, [1 + 2**-40]) if wide else (np.float32, [1]))


def test_a_function_that_asks_for_a_number_of_rows(tmp_path: Path) -> None:
    folder = tensord.models.export(
        tmp_path / "m", lambda _, inputs: {"y": inputs["x"] * len(inputs["x"])}, None, {"x": "FP32[2]"}, 6
    )
    assert sorted(path.name for path in (folder / "1").iterdir()) == [f"rows{rows}.jaxexport" for rows in (1, 2, 4, 6)]
    module, _ = read(folder)
    assert (module.batch_buckets, module.max_batch_size) == ((1, 2, 4, 6), 6)
    apply, params = module.create(folder / "1", {}, jax.devices()[0])
    assert apply(params, {"x": np.ones((4, 2), np.float32)})["y"][0, 0] == 4


def test_refusals(tmp_path: Path) -> None:
    def exported(name: str, function: Any, inputs: dict[str, str], **more: Any) -> str:
        with pytest.raises(InvalidArgument) as caught:
            tensord.models.export(tmp_path / name, function, None, inputs, **more)
        return caught.value.message

    assert "input 'x' is BYTES" in exported("a", lambda _, inputs: inputs, {"x": "BYTES[1]"})
    assert "expected a datatype with dims" in exported("b", lambda _, inputs: inputs, {"x": "float"})
    assert "cannot be exported: ZeroDivisionError" in exported("c", lambda _, inputs: {"y": 1 // 0}, {"x": "FP32[1]"})
    assert "output 'y' is complex64" in exported("d", lambda _, inputs: {"y": inputs["x"] * 1j}, {"x": "FP32[1]"})
    for orders in (3, -1, True, 1.0):
        told = exported("d", lambda _, inputs: inputs, {"x": "FP32[1]"}, derivatives=orders)
        assert told == f"derivatives is {orders!r}; a number of orders from 0 to 2 is expected"
    assert not (tmp_path / "d").exists()
    tensord.models.export(tmp_path / "e", lambda _, inputs: inputs, None, {"x": "FP32[1]"})
    assert "is not empty" in exported("e", lambda _, inputs: inputs, {"x": "FP32[1]"})


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_whoever_the_umask_lets_may_read_it(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        folder = tensord.models.export(tmp_path / "m", pooled, PARAMETERS, INPUTS, 8, {"width": (16, 64)})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


@pytest.mark.parametrize("rows", [0, 4])
def test_derivatives_go_along(tmp_path: Path, rows: int) -> None:
    """The program says by itself how many orders it has; a function without a pull-back cannot carry one."""

    def apply(params: Any, inputs: Any) -> Any:
        return {"y": params["w"] * jnp.sin(inputs["x"]) + inputs["n"], "n": inputs["n"]}

    inputs = {"x": "FP32[3]", "n": "INT32[1]"}
    given = {"x": np.ones((rows, 3)[not rows :], np.float32), "n": np.zeros((rows, 1)[not rows :], np.int32)}
    for order in (1, 2):
        folder = tensord.models.export(
            tmp_path / f"m{order}", apply, {"w": np.float32(2)}, inputs, rows, derivatives=order
        )
        assert "derivatives" not in (folder / "config.pbtxt").read_text()
        with testing.load(folder) as model:
            pulled = model.pull_back(given, {"y": given["x"]})
            np.testing.assert_allclose(pulled["x"], 2 * np.cos(given["x"]), rtol=1e-6)
            gradient = model.derivative("parameter_gradient")({**given, "cotangent.y": given["x"]})
            np.testing.assert_allclose(gradient["w"], np.sin(given["x"]).sum(), rtol=1e-6)
            assert model.derivative("pull_back").has_derivative("pull_back") == (order == 2)
    with pytest.raises(InvalidArgument, match="cannot be exported: ValueError: Reverse-mode differentiation does not"):
        tensord.models.export(
            tmp_path / "loop",
            lambda _, inputs: {"y": jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: 2 * y + 1, inputs["x"])},
            None,
            {"x": "FP32[3]"},
            rows,
            derivatives=1,
        )
