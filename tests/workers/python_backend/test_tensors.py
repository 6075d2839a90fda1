"""Tensors and datatypes of Triton Python models, used as they use them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tensord.workers.python_backend import tensors
from tensord.workers.python_backend.errors import TritonModelException


def test_tensor() -> None:
    values = np.arange(4, dtype=np.int16)
    tensor = tensors.Tensor("x", values)
    assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("x", [4], True)
    assert tensor.as_numpy() is values
    assert tensor.triton_dtype() == 7
    with pytest.raises(TritonModelException, match="complex"):
        tensors.Tensor("x", np.zeros(1, np.complex64))
    with pytest.raises(TypeError, match="a numpy array is expected, not list"):
        tensors.Tensor("x", [1])  # type: ignore[arg-type]


def test_a_borrowed_input_is_the_model_s_own_once_it_asks() -> None:
    values = np.arange(4)
    values.flags.writeable = False
    tensor = tensors.Tensor.borrowed("x", values)
    assert tensor.content is values
    tensor.as_numpy()[0] = 9
    assert values[0] == 0
    assert tensor.as_numpy()[0] == 9


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float16, np.float64, ml_dtypes.bfloat16])
def test_dlpack_both_ways(dtype: Any) -> None:
    values = np.array([[0, 1], [1, 0]]).astype(dtype)
    for source in (tensors.Tensor("x", values), tensors.Tensor.borrowed("x", values)):
        for exported in (source.to_dlpack(), source):
            found = tensors.Tensor.from_dlpack("y", exported)
            assert found.name() == "y"
            assert found.content.dtype == values.dtype
            np.testing.assert_array_equal(found.content, values)
    np.testing.assert_array_equal(tensors.Tensor.from_dlpack("y", jnp.ones(3)).as_numpy(), np.ones(3))
    np.testing.assert_array_equal(tensors.Tensor.from_dlpack("y", np.ones(3)).as_numpy(), np.ones(3))


@pytest.mark.parametrize(
    ("text", "name", "dtype"),
    [("TYPE_FP32", "FP32", np.float32), ("TYPE_STRING", "BYTES", np.object_), ("TYPE_UINT64", "UINT64", np.uint64)],
)
def test_datatypes(text: str, name: str, dtype: Any) -> None:
    assert tensors.triton_string_to_numpy(text) is dtype
    assert tensors.np_to_triton_dtype(dtype) == name
    assert tensors.triton_to_np_dtype(name) is dtype
    assert tensors.triton_to_numpy_type(tensors.numpy_to_triton_type(dtype)) is dtype
    with pytest.raises(TritonModelException, match="no name"):
        tensors.np_to_triton_dtype(np.complex64)
