"""Trees in safetensors' layout, as its own library reads them; and memory that nobody changes any more."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tensord_client import InvalidArgument
from tensord_client.parameters import layout, sealed

from tensord import parameter_files
from tensord.workers.parameters.leaves import names_of


class Layer(NamedTuple):
    kernel: Any
    bias: Any


TREE = {
    "dense": Layer(np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float16)),
    "scales": [np.float64(2.5), np.zeros((0, 4), np.int8)],
    "flags": {"on": np.array([True, False])},
    "dotted.name": np.arange(3, dtype=np.uint32)[::2],
    "nothing": None,
}
NAMES = {"dense.kernel", "dense.bias", "scales.0", "scales.1", "flags.on", "dotted.name"}


def test_a_tree_is_what_safetensors_reads() -> None:
    content = b"".join(layout(TREE))
    found = safetensors.numpy.load(content)
    assert found.keys() == NAMES
    dense = TREE["dense"]
    assert isinstance(dense, Layer)
    np.testing.assert_array_equal(found["dense.kernel"], dense.kernel)
    np.testing.assert_array_equal(found["dotted.name"], [0, 2])
    assert (found["scales.0"].shape, float(found["scales.0"])) == ((), 2.5)
    assert found["scales.1"].shape == (0, 4)
    (size,) = np.frombuffer(content, "<u8", 1)
    assert (8 + size) % 64 == 0
    # What lies behind what has an odd size is aligned as well.
    header = json.loads(content[8 : 8 + size])
    for name, entry in header.items():
        assert entry["data_offsets"][0] % found[name].dtype.itemsize == 0, name


def test_names_are_the_same_without_jax() -> None:
    """A learner need not have JAX."""
    code = (
        "import collections, json, sys, numpy as np; from tensord_client.parameters import layout;"
        "L = collections.namedtuple('L', 'kernel bias');"
        "t = {'dense': L(np.ones(2), np.ones(1)), 'scales': [np.ones(1), (np.ones(1), None)], 'a.b': np.ones(1)};"
        "c = b''.join(layout(t)); n = int.from_bytes(c[:8], 'little');"
        "assert 'jax' not in sys.modules; print(json.dumps(sorted(json.loads(c[8:8 + n]))))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    tree = {"dense": Layer(np.ones(2), np.ones(1)), "scales": [np.ones(1), (np.ones(1), None)], "a.b": np.ones(1)}
    assert json.loads(found) == sorted(safetensors.numpy.load(b"".join(layout(tree))))


@pytest.mark.parametrize(
    "tree", [TREE, np.ones(2, np.float32), [np.ones(1), (np.ones(1), None)]], ids=["dict", "one", "list"]
)
def test_names_are_those_of_a_worker_and_of_a_file(tree: Any) -> None:
    names = safetensors.numpy.load(b"".join(layout(tree))).keys()
    assert names == set(names_of(tree)) == parameter_files.flat(tree).keys()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_elements_that_numpy_does_not_have(dtype: str) -> None:
    array = np.arange(8).astype(getattr(ml_dtypes, dtype))
    content = b"".join(layout({"x": jnp.asarray(array)}))
    assert content.endswith(array.tobytes())
    kinds = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    assert json.loads(content[8 : -array.nbytes])["x"]["dtype"] == kinds[dtype]


def test_a_jax_array_alone_and_other_byte_orders() -> None:
    assert safetensors.numpy.load(b"".join(layout(jax.numpy.ones(2)))).keys() == {"array"}
    swapped = np.arange(3, dtype=">f4")
    np.testing.assert_array_equal(safetensors.numpy.load(b"".join(layout({"x": swapped})))["x"], [0, 1, 2])


@pytest.mark.parametrize("tree", [{}, {"x": "text"}, {"x": object()}, {"x": [None]}])
def test_what_is_no_tree_of_arrays(tree: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"parameter|tree"):
        b"".join(layout(tree))


def test_memory_is_sealed() -> None:
    memory = sealed([b"abc", memoryview(b"defg")])
    try:
        assert os.pread(memory, 100, 0) == b"abcdefg"
        every = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        assert fcntl.fcntl(memory, fcntl.F_GET_SEALS) == every
        with pytest.raises(PermissionError):
            os.pwrite(memory, b"x", 0)
    finally:
        os.close(memory)


def test_bfloat16_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch gives numpy no array of it, but of its bits."""

    class Tensor:
        def __init__(self, dtype: str, array: Any) -> None:
            self.dtype, self.array, self.shape = dtype, array, array.shape

        def detach(self) -> Any:
            return self

        def view(self, dtype: str) -> Any:
            return self.array.view(dtype)

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError(f"Got unsupported ScalarType {self.dtype}")

    torch = types.SimpleNamespace(Tensor=Tensor, bfloat16="bfloat16", int16="int16")
    monkeypatch.setitem(sys.modules, "torch", torch)
    values = np.array([[1, 2.5]], ml_dtypes.bfloat16)
    for given in (Tensor("bfloat16", values), Tensor("bfloat16", values[0, 0].reshape(()))):
        content = b"".join(layout({"w": given}))
        (size,) = np.frombuffer(content, "<u8", 1)
        assert json.loads(content[8 : 8 + size])["w"]["dtype"] == "BF16"
        assert json.loads(content[8 : 8 + size])["w"]["shape"] == list(given.shape)
        assert content[8 + size :] == given.array.tobytes()
