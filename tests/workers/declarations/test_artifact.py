"""Versions without a model.py: what programs of jax.export and StableHLO declare, answer, and are refused for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from safetensors.numpy import save_file

from tensord import testing
from tensord.config.model_config import empty
from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations import artifact
from tensord.workers.declarations.artifact import ProgramFile
from tests.generated import examples

ROW = jax.ShapeDtypeStruct((2, 4), np.float32)
Spec = jax.ShapeDtypeStruct


def config(text: str = "") -> Any:
    message = empty()
    text_format.Parse(text, message)
    message.name = message.name or "m"
    return message


def layers(params: Any, inputs: Any) -> Any:
    x = inputs["x"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return {"y": x, "stats": {"sum": x.sum(axis=-1)}}


WEIGHTS = {"layers": [{"w": np.random.default_rng(seed).random((4, 4), np.float32)} for seed in (1, 2)]}


def written(folder: Path, function: Callable[..., Any], *arguments: Any, name: str = "m", **how: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jaxexport"
    path.write_bytes(export.export(jax.jit(function), **how)(*arguments).serialize())
    return path


def with_weights(folder: Path) -> None:
    specs = jax.tree.map(lambda array: Spec(array.shape, array.dtype), WEIGHTS)
    written(folder, layers, specs, {"x": Spec(export.symbolic_shape("batch, 4"), np.float32)})
    save_file({f"layers.{n}.w": layer["w"] for n, layer in enumerate(WEIGHTS["layers"])}, folder / "params.safetensors")


def test_a_function_with_parameters(tmp_path: Path) -> None:
    with_weights(tmp_path)
    module = artifact.module(tmp_path, config(), "cpu")
    assert module.inputs == {"x": "FP32[4]"}
    assert module.outputs == {"stats.sum": "FP32[]", "y": "FP32[4]"}
    assert module.max_batch_size == 32
    apply, params = module.create(tmp_path, {}, jax.devices()[0])
    for rows in (1, 3):
        x = np.random.default_rng(rows).random((rows, 4), np.float32)
        made = jax.jit(apply)(params, {"x": x})
        expected = layers(WEIGHTS, {"x": x})
        np.testing.assert_allclose(made["y"], expected["y"], rtol=1e-6)
        np.testing.assert_allclose(made["stats.sum"], expected["stats"]["sum"], rtol=1e-6)


@pytest.mark.parametrize("kind", ["npz", "msgpack"])
def test_parameters_of_other_kinds(tmp_path: Path, kind: str) -> None:
    with_weights(tmp_path)
    (tmp_path / "params.safetensors").unlink()
    if kind == "npz":
        np.savez(tmp_path / "params.npz", **{f"layers.{n}.w": layer["w"] for n, layer in enumerate(WEIGHTS["layers"])})
    else:
        state = serialization.to_state_dict(WEIGHTS)
        (tmp_path / "params.msgpack").write_bytes(serialization.msgpack_serialize(state))
    _, params = artifact.module(tmp_path, config(), "cpu").create(tmp_path, {}, jax.devices()[0])
    np.testing.assert_array_equal(params["layers.1.w"], WEIGHTS["layers"][1]["w"])


def test_a_parameter_may_have_the_name_of_an_input(tmp_path: Path) -> None:
    row = Spec((4,), np.float32)
    written(tmp_path, lambda params, inputs: {"x": inputs["x"] - params["x"]}, {"x": row}, {"x": row})
    np.savez(tmp_path / "params.npz", x=np.ones(4, np.float32))
    apply, params = artifact.module(tmp_path, config(), "cpu").create(tmp_path, {}, jax.devices()[0])
    assert list(params) == ["x"]
    np.testing.assert_array_equal(apply(params, {"x": np.full(4, 3, np.float32)})["x"], np.full(4, 2, np.float32))


def test_parameters_of_64_bits_beside_inputs_of_32(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    row = Spec((1,), np.float32)
    with jax.enable_x64(True):
        written(
            tmp_path / "m" / "1",
            lambda params, x: ((x - params) * 2**30).astype(np.float32),
            Spec((1,), np.float64),
            row,
        )
    np.savez(tmp_path / "m" / "1" / "params.npz", array=np.array([1 - 2**-30]))
    with testing.load(tmp_path / "m") as model:
        assert model({"input_0": np.ones(1, np.float32)})["output_0"].tolist() == [1]
    assert not jax.config.jax_enable_x64


def test_names(tmp_path: Path) -> None:
    written(tmp_path / "a", lambda x, y: (x + y, [x - y]), ROW, ROW)
    module = artifact.module(tmp_path / "a", config(), "cpu")
    assert module.inputs == {"input_0": "FP32[2, 4]", "input_1": "FP32[2, 4]"}
    assert module.outputs == {"output_0": "FP32[2, 4]", "1.0": "FP32[2, 4]"}
    assert not hasattr(module, "max_batch_size")
    written(tmp_path / "b", lambda x: x * 2, ROW)
    module = artifact.module(tmp_path / "b", config(), "cpu")
    assert (module.inputs, module.outputs) == ({"input_0": "FP32[2, 4]"}, {"output_0": "FP32[2, 4]"})


def test_config_names_what_is_only_numbered(tmp_path: Path) -> None:
    written(tmp_path, lambda x, y: (x + y, x - y), ROW, ROW)
    text = 'input [{name: "A"}, {name: "B"}] output [{name: "sum"}, {name: "difference"}]'
    module = artifact.module(tmp_path, config(text), "cpu")
    assert list(module.inputs) == ["A", "B"]
    assert list(module.outputs) == ["sum", "difference"]
    apply, params = module.create(tmp_path, {}, jax.devices()[0])
    made = apply(params, {"A": np.full((2, 4), 5, np.float32), "B": np.ones((2, 4), np.float32)})
    assert made["sum"][0, 0] == 6
    assert made["difference"][0, 0] == 4


def test_a_program_of_lists(tmp_path: Path) -> None:
    """A module that torchax exports has a list of parameters, a tuple in a tuple as inputs, and no names."""

    def function(weights: Any, inputs: Any) -> Any:
        ((x, y),) = inputs
        return (x * weights[0] + y @ weights[1],)

    weights = [np.float32(3), np.eye(4, dtype=np.float32)]
    row = Spec(export.symbolic_shape("s31, 4"), np.float32)
    written(tmp_path, function, weights, ((row, row),))
    np.savez(tmp_path / "params.npz", **{str(number): array for number, array in enumerate(weights)})
    module = artifact.module(tmp_path, config(), "cpu")
    assert (list(module.inputs), list(module.outputs)) == (["0.0", "0.1"], ["output_0"])
    text = 'max_batch_size: 8 input [{name: "x"}, {name: "y"}] output {name: "sum"}'
    module = artifact.module(tmp_path, config(text), "cpu")
    assert (module.inputs, module.outputs) == ({"x": "FP32[4]", "y": "FP32[4]"}, {"sum": "FP32[4]"})
    apply, params = module.create(tmp_path, {}, jax.devices()[0])
    made = jax.jit(apply)(params, {"x": np.ones((2, 4), np.float32), "y": np.full((2, 4), 2, np.float32)})
    np.testing.assert_array_equal(made["sum"], np.full((2, 4), 5, np.float32))


def test_a_varying_size_is_the_batch_only_where_it_says_so(tmp_path: Path) -> None:
    def along(inputs: Any) -> Any:
        return {"y": jnp.cumsum(inputs["tokens"], axis=0)}

    written(tmp_path, along, {"tokens": Spec(export.symbolic_shape("length"), np.float32)})
    module = artifact.module(tmp_path, config(), "cpu")
    assert module.inputs == {"tokens": "FP32[length]"}
    assert not hasattr(module, "max_batch_size")


def test_one_program_for_each_shape(tmp_path: Path) -> None:
    for rows in (1, 8):
        spec = Spec((rows, 4), np.float32)
        written(tmp_path, lambda inputs: {"y": inputs["x"] * 2}, {"x": spec}, name=f"rows{rows}")
    module = artifact.module(tmp_path, config("max_batch_size: 8"), "cpu")
    assert (module.batch_buckets, module.max_batch_size, module.inputs) == ((1, 8), 8, {"x": "FP32[4]"})
    apply, params = module.create(tmp_path, {}, jax.devices()[0])
    for rows in (1, 8):
        assert apply(params, {"x": np.ones((rows, 4), np.float32)})["y"].shape == (rows, 4)
    with pytest.raises(ValueError, match=r"no program of this model takes 'x' \[3, 4\]"):
        apply(params, {"x": np.ones((3, 4), np.float32)})


def test_one_program_for_each_platform(tmp_path: Path) -> None:
    written(tmp_path, lambda x: x + 1, ROW, name="cpu", platforms=("cpu",))
    written(tmp_path, lambda x: x + 2, ROW, name="other", platforms=("tpu",))
    apply, params = artifact.module(tmp_path, config(), "cpu").create(tmp_path, {}, jax.devices()[0])
    assert apply(params, {"input_0": np.zeros((2, 4), np.float32)})["output_0"][0, 0] == 1


@pytest.mark.parametrize("form", ["text", "portable"])
def test_stablehlo(tmp_path: Path, form: str) -> None:
    from jax.extend.mlir.dialects import stablehlo

    text = jax.jit(lambda x, y: (x + y, x - y)).lower(ROW, ROW).as_text()
    content = text.encode()
    if form == "portable":
        content = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_current_version())
    (tmp_path / "m.stablehlo").write_bytes(content)
    module = artifact.module(tmp_path, config(), "cpu")
    assert module.inputs == {"input_0": "FP32[2, 4]", "input_1": "FP32[2, 4]"}
    apply, params = module.create(tmp_path, {}, jax.devices()[0])
    x = np.full((2, 4), 3, np.float32)
    made = jax.jit(apply)(params, {"input_0": x, "input_1": x})
    assert made["output_0"][1, 1] == 6
    assert made["output_1"][1, 1] == 0


def refused(folder: Path, text: str = "", platform: str = "cpu") -> str:
    with pytest.raises(InvalidArgument) as caught:
        artifact.module(folder, config(text), platform).create(folder, {}, jax.devices()[0])
    return caught.value.message


def test_what_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "tpu", lambda x: x, ROW, platforms=("tpu",))
    assert "none of its programs runs on cpu: m.jaxexport is for tpu" in refused(tmp_path / "tpu")
    written(tmp_path / "key", lambda x: x, jax.eval_shape(lambda: jax.random.key(0)))
    assert "m.jaxexport: input 'input_0' is key<fry>[]" in refused(tmp_path / "key")
    written(tmp_path / "none", lambda: jnp.ones(3))
    assert refused(tmp_path / "none") == "m.jaxexport has no inputs"
    written(tmp_path / "batch", lambda x: x.sum(), ROW)
    assert "'output_0' of m.jaxexport is FP32[]: its first dim is no batch" in refused(
        tmp_path / "batch", "max_batch_size: 4"
    )
    optional = 'input { name: "input_0" data_type: TYPE_FP32 dims: [2, 4] optional: true }'
    written(tmp_path / "optional", lambda x: x, ROW)
    assert "a program takes all of its inputs, and 'input_0' is optional" in refused(tmp_path / "optional", optional)
    written(tmp_path / "two", lambda x: x, ROW, name="a")
    written(tmp_path / "two", lambda x: x, Spec((2, 4), np.int32), name="b")
    assert "a.jaxexport and b.jaxexport differ in input 'input_0'" in refused(tmp_path / "two")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "m.mlir").write_text("module @m { nonsense")
    assert "m.mlir cannot be read as a program" in refused(tmp_path / "text")


def test_parameters_that_do_not_fit(tmp_path: Path) -> None:
    with_weights(tmp_path)
    weight = WEIGHTS["layers"][0]["w"]
    save_file({"layers.0.w": weight}, tmp_path / "params.safetensors")
    assert "params.safetensors has no 'layers.1.w', which m.jaxexport takes as FP32[4, 4]" in refused(tmp_path)
    save_file({"layers.0.w": weight, "layers.1.w": weight[:2]}, tmp_path / "params.safetensors")
    assert "'layers.1.w' is FP32[2, 4], m.jaxexport takes FP32[4, 4]" in refused(tmp_path)
    np.savez(tmp_path / "params.npz", a=weight)
    assert "parameters in params.safetensors, params.npz; one of them is expected" in refused(tmp_path)


def test_a_program_of_another_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, lambda x: x, ROW)
    newest = export.maximum_supported_calling_convention_version
    monkeypatch.setattr(export, "maximum_supported_calling_convention_version", newest - 1)
    monkeypatch.setattr(export, "minimum_supported_calling_convention_version", newest - 2)
    assert f"was written by a much newer JAX: its calling convention is {newest}" in refused(tmp_path)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = written(tmp_path_factory.mktemp("good"), layers, WEIGHTS, {"x": ROW})
    return path.read_bytes()


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_damaged_programs_are_one_clear_error(good: bytes, tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """A program with any changed bytes is read as one, or refused in a sentence with its name."""
    chance = random.Random(seed)
    content = bytearray(good)
    if chance.random() < 0.3:
        content = content[: chance.randrange(len(content))]
    for _ in range(chance.choice([0, 1, 2, 8, 50])):
        if content:
            content[chance.randrange(len(content))] = chance.randrange(256)
    path = tmp_path_factory.getbasetemp() / "damaged.jaxexport"
    path.write_bytes(content)
    try:
        program = ProgramFile(path, has_parameters=True)
        assert program.inputs
    except InvalidArgument as error:
        assert "damaged.jaxexport" in error.message
        assert len(error.message) < 1000
