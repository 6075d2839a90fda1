"""The interface that Triton Python models import, used as they use it."""

from __future__ import annotations

import json
import logging
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from workers.models import python_backend as pb_utils


def test_tensor() -> None:
    values = np.arange(4, dtype=np.int16)
    tensor = pb_utils.Tensor("x", values)
    assert (tensor.name(), tensor.shape(), tensor.is_cpu()) == ("x", [4], True)
    assert tensor.as_numpy() is values
    assert tensor.triton_dtype() == 7
    with pytest.raises(pb_utils.TritonModelException, match="complex"):
        pb_utils.Tensor("x", np.zeros(1, np.complex64))
    with pytest.raises(pb_utils.TritonModelException, match="a numpy array is expected, not list"):
        pb_utils.Tensor("x", [1])  # type: ignore[arg-type]


def test_a_borrowed_input_is_the_model_s_own_once_it_asks() -> None:
    values = np.arange(4)
    values.flags.writeable = False
    tensor = pb_utils.Tensor.borrowed("x", values)
    assert tensor.content is values
    tensor.as_numpy()[0] = 9
    assert values[0] == 0
    assert tensor.as_numpy()[0] == 9


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float16, np.float64, ml_dtypes.bfloat16])
def test_dlpack_both_ways(dtype: Any) -> None:
    values = np.array([[0, 1], [1, 0]]).astype(dtype)
    for source in (pb_utils.Tensor("x", values), pb_utils.Tensor.borrowed("x", values)):
        for exported in (source.to_dlpack(), source):
            found = pb_utils.Tensor.from_dlpack("y", exported)
            assert found.name() == "y"
            assert found.content.dtype == values.dtype
            np.testing.assert_array_equal(found.content, values)
    np.testing.assert_array_equal(pb_utils.Tensor.from_dlpack("y", jnp.ones(3)).as_numpy(), np.ones(3))
    np.testing.assert_array_equal(pb_utils.Tensor.from_dlpack("y", np.ones(3)).as_numpy(), np.ones(3))


@pytest.mark.parametrize(
    ("text", "name", "dtype"),
    [("TYPE_FP32", "FP32", np.float32), ("TYPE_STRING", "BYTES", np.object_), ("TYPE_UINT64", "UINT64", np.uint64)],
)
def test_datatypes(text: str, name: str, dtype: Any) -> None:
    assert pb_utils.triton_string_to_numpy(text) is dtype
    assert pb_utils.np_to_triton_dtype(dtype) == name
    assert pb_utils.triton_to_np_dtype(name) is dtype
    assert pb_utils.triton_to_numpy_type(pb_utils.numpy_to_triton_type(dtype)) is dtype
    with pytest.raises(pb_utils.TritonModelException, match="no name"):
        pb_utils.np_to_triton_dtype(np.complex64)


def test_bytes() -> None:
    words = np.array([[b"a", b""], [b"ccc", b"d"]], np.object_)
    encoded = pb_utils.serialize_byte_tensor(words)
    assert pb_utils.deserialize_bytes_tensor(encoded.tobytes()).tolist() == [b"a", b"", b"ccc", b"d"]
    assert pb_utils.np_to_triton_dtype(np.dtype("S3")) == "BYTES"


def test_request_and_response() -> None:
    x = pb_utils.Tensor("x", np.zeros(1))
    request = pb_utils.InferenceRequest("id", 7, [x], ["y"], "m", flags=3, timeout=5, parameters={"a": 1})
    assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("id", 7, 3, 5)
    assert request.requested_output_names() == ["y"]
    assert json.loads(request.parameters()) == {"a": 1}
    assert pb_utils.get_input_tensor_by_name(request, "x") is x
    assert pb_utils.get_input_tensor_by_name(request, "z") is None
    assert not request.is_cancelled()
    for call in (request.get_response_sender, request.exec, request.async_exec):
        with pytest.raises(pb_utils.TritonModelException, match="not supported by this server yet"):
            call()
    good = pb_utils.InferenceResponse([x])
    assert not good.has_error()
    assert pb_utils.get_output_tensor_by_name(good, "x") is x
    bad = pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND))
    assert bad.has_error()
    assert (bad.error().message(), bad.error().code()) == ("no", "NOT_FOUND")
    assert pb_utils.TritonError("x").code() == "INTERNAL"


def test_configuration_completed_by_the_model() -> None:
    config = pb_utils.ModelConfig({"name": "m", "input": [{"name": "x", "data_type": "TYPE_INVALID", "dims": []}]})
    config.set_max_batch_size(4)
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [3]})
    config.add_input({"name": "w", "data_type": "TYPE_FP32", "dims": [1], "optional": True})
    config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [3]})
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": False})
    assert config.as_dict() == {
        "name": "m",
        "max_batch_size": 4,
        "input": [
            {"name": "x", "data_type": "TYPE_FP32", "dims": [3]},
            {"name": "w", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
        ],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": False},
    }
    found = config.as_dict()
    assert pb_utils.get_input_config_by_name(found, "w")["dims"] == [1]
    assert pb_utils.get_output_config_by_name(found, "z") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(found)
    with pytest.raises(ValueError, match="dims is"):
        config.add_input({"name": "x", "dims": [4]})
    with pytest.raises(ValueError, match="unknown properties: shape"):
        config.add_input({"name": "x", "shape": [4]})
    with pytest.raises(ValueError, match="max_batch_size 4"):
        config.set_max_batch_size(8)
    with pytest.raises(ValueError, match="unknown model transaction policy"):
        config.set_model_transaction_policy({"x": 1})


def test_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pb_utils.Logger.log_warn("careful")
        pb_utils.Logger.log("hello")
        pb_utils.Logger.log_verbose("hidden")
    assert [record.message for record in caplog.records] == ["careful", "hello"]
