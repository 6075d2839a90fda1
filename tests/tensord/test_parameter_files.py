"""Files of parameters that the libraries themselves wrote; and what damaged ones say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import tensord.models
from tensord.parameter_files import flat

ARRAYS = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.ones((2, 2), ml_dtypes.bfloat16),
    "count": np.array(3, np.int32),
}


def same(found: Any, expected: Any) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_safetensors(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "p.safetensors")
    same(tensord.models.load(tmp_path / "p.safetensors"), ARRAYS)


def test_npz(tmp_path: Path) -> None:
    arrays = {name: array for name, array in ARRAYS.items() if name != "half"}
    np.savez(tmp_path / "p.npz", **arrays)
    same(tensord.models.load(str(tmp_path / "p.npz")), arrays)


def test_msgpack(tmp_path: Path) -> None:
    tree = {"layer": ARRAYS, "step": 5, "phase": 1 + 2j, "scalar": np.float32(2)}
    from flax import serialization

    (tmp_path / "p.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    found = tensord.models.load(tmp_path / "p.msgpack")
    same(found["layer"], ARRAYS)
    assert (found["step"], found["phase"], found["scalar"]) == (5, 1 + 2j, 2)


def test_large_arrays_of_flax_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flax import serialization

    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 16)
    (tmp_path / "p.msgpack").write_bytes(serialization.msgpack_serialize({"w": ARRAYS["w"]}))
    same(tensord.models.load(tmp_path / "p.msgpack"), {"w": ARRAYS["w"]})


def test_orbax(tmp_path: Path) -> None:
    tree = {"layers": [{"w": ARRAYS["w"]}, {"w": ARRAYS["w"] + 1}], "count": ARRAYS["count"]}
    import orbax.checkpoint as orbax

    with orbax.StandardCheckpointer() as writer:
        writer.save((tmp_path / "params").absolute(), tree)
    found = flat(tensord.models.load(tmp_path / "params"))
    same(found, {"layers.0.w": ARRAYS["w"], "layers.1.w": ARRAYS["w"] + 1, "count": ARRAYS["count"]})


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_sharded(tmp_path: Path, kind: str) -> None:
    arrays = {"w": ARRAYS["w"], "count": ARRAYS["count"]}
    if kind == "npz":
        np.savez(tmp_path / "p.npz", **arrays)
    else:
        save_file(arrays, tmp_path / "p.safetensors")
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))

    def where(name: str, shape: tuple[int, ...]) -> NamedSharding:
        assert shape == arrays[name].shape
        return NamedSharding(mesh, PartitionSpec("x") if shape else PartitionSpec())

    found = tensord.models.load(tmp_path / f"p.{kind}", where)
    same(found, arrays)
    assert found["w"].sharding.spec == PartitionSpec("x")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there are no parameters at"):
        tensord.models.load(tmp_path / "none.npz")
    for name in ("a.npz", "a.safetensors", "a.msgpack"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            tensord.models.load(tmp_path / name)
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a.bin is none of .safetensors, .npz and .msgpack"):
        tensord.models.load(tmp_path / "a.bin")
    np.savez(tmp_path / "objects.npz", a=np.array([object()]))
    with pytest.raises(ValueError, match="holds objects and not arrays"):
        tensord.models.load(tmp_path / "objects.npz")


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.msgpack", "a/_METADATA"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="no regular file"):
        tensord.models.load(tmp_path / path.relative_to(tmp_path).parts[0])


def test_names_that_are_nested(tmp_path: Path) -> None:
    """Nested names give nested dicts, as Flax Linen's ``apply`` takes them."""
    array = np.ones(2, np.float32)
    for separator in "./":
        names = [
            separator.join(way) for way in (("params", "Dense_0", "kernel"), ("params", "Dense_0", "bias"), ("step",))
        ]
        save_file(dict.fromkeys(names, array), tmp_path / "p.safetensors")
        found = tensord.models.load(tmp_path / "p.safetensors", nested=True)
        assert jax.tree.map(np.shape, found) == {"params": {"Dense_0": {"kernel": (2,), "bias": (2,)}}, "step": (2,)}
    for names in (["a", "a.b"], ["a.b", "a"]):
        np.savez(tmp_path / "p.npz", **dict.fromkeys(names, array))
        with pytest.raises(ValueError, match="they cannot be nested"):
            tensord.models.load(tmp_path / "p.npz", nested=True)
