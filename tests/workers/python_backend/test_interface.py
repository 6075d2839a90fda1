"""The interface that Triton Python models import, used as they use it."""

from __future__ import annotations

import json
import operator
from typing import Any

import numpy as np
import pytest

from tensord.workers.python_backend import interface as pb_utils
from tensord.workers.python_backend.request import parameters_of


def test_bytes() -> None:
    words = np.array([[b"a", b""], [b"ccc", b"d"]], np.object_)
    encoded = pb_utils.serialize_byte_tensor(words)
    assert pb_utils.deserialize_bytes_tensor(encoded.tobytes()).tolist() == [b"a", b"", b"ccc", b"d"]
    assert pb_utils.np_to_triton_dtype(np.dtype("S3")) == "BYTES"


@pytest.mark.parametrize("version", ["0", "x", "9" * 5000])
def test_a_version_that_is_no_number(version: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="version should be an integral value > 0"):
        pb_utils.is_model_ready("m", version)


def test_request_and_response() -> None:
    x = pb_utils.Tensor("x", np.zeros(1))
    request = pb_utils.InferenceRequest("id", 7, [x], ["y"], "m", flags=3, timeout=5, parameters={"a": 1})
    assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("id", 7, 3, 5)
    assert request.requested_output_names() == ["y"]
    assert json.loads(request.parameters()) == {"a": 1}
    assert pb_utils.get_input_tensor_by_name(request, "x") is x
    assert pb_utils.get_input_tensor_by_name(request, "z") is None
    assert not request.is_cancelled()
    with pytest.raises(pb_utils.TritonModelException, match="Only a request that execute\\(\\) was given"):
        request.get_response_sender()
    with pytest.raises(pb_utils.TritonModelException, match="BLS is only supported during the 'execute' function"):
        request.exec()
    with pytest.raises(RuntimeError, match="no running event loop"):
        request.async_exec()
    good = pb_utils.InferenceResponse([x])
    assert not good.has_error()
    assert pb_utils.get_output_tensor_by_name(good, "x") is x
    bad = pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND))
    assert bad.has_error()
    assert (bad.error().message(), bad.error().code()) == ("no", pb_utils.TritonError.NOT_FOUND)


def test_it_is_one_module_for_models() -> None:
    """Models find every name in it, in whichever file the name is defined."""
    names = "Tensor TritonError TritonModelException ModelConfig np_to_triton_dtype get_input_config_by_name"
    assert all(hasattr(pb_utils, name) for name in names.split())


_X = pb_utils.Tensor("x", np.zeros(1, np.float32))
_ARRAY = np.zeros(1, np.float32)
_REQUEST: dict[str, Any] = {"model_name": "m", "inputs": [_X], "requested_output_names": ["y"]}
#: What is made, with which arguments, what it raises, and words of it.
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    *(
        ("InferenceRequest", (), {**_REQUEST, name: None}, TypeError, f"{name} cannot be None")
        for name in (*_REQUEST, "request_id", "correlation_id", "model_version", "flags", "timeout", "trace")
    ),
    ("InferenceRequest", (), {**_REQUEST, "preferred_memory": None}, TypeError, "preferred_memory cannot be None"),
    *(
        ("InferenceRequest", (), {key: _REQUEST[key] for key in _REQUEST if key != name}, TypeError, name)
        for name in _REQUEST
    ),
    *(
        ("InferenceRequest", (), {**_REQUEST, name: value}, TypeError, words)
        for name, value, words in (
            ("request_id", 1, "request_id cannot be 1"),
            ("model_version", "1", "model_version cannot be '1'"),
            ("flags", 1.0, "flags cannot be 1.0"),
            ("timeout", "1", "timeout cannot be '1'"),
            ("trace", 1, "trace cannot be 1"),
            ("inputs", _X, "inputs cannot be"),
            ("inputs", ["x"], "inputs are of type Tensor, found str"),
            ("requested_output_names", [None], "a list of str, found None"),
            ("requested_output_names", [1], "a list of str, found 1"),
            ("requested_output_names", "y", "a list of str, found 'y'"),
            ("correleation_id", None, "unexpected keyword argument"),
        )
    ),
    ("InferenceRequest", (), {**_REQUEST, "inputs": [None]}, pb_utils.TritonModelException, "Input tensor for request"),
    (
        "InferenceRequest",
        (),
        {**_REQUEST, "requested_output_names": [""]},
        pb_utils.TritonModelException,
        "Requested output name for request",
    ),
    ("InferenceRequest", (), {**_REQUEST, "correlation_id": 1.5}, pb_utils.TritonModelException, "Correlation ID must"),
    ("InferenceResponse", ([_X, None],), {}, pb_utils.TritonModelException, "Output tensor for inference response"),
    ("InferenceResponse", (None,), {}, TypeError, "None"),
    ("InferenceResponse", ([1],), {}, TypeError, "found int"),
    ("Tensor", (None, _ARRAY), {}, TypeError, "the name of a tensor"),
    ("Tensor", ("x", None), {}, TypeError, "a numpy array is expected, not NoneType"),
    ("Tensor", ("", None), {}, TypeError, "a numpy array is expected, not NoneType"),
    ("Tensor.from_dlpack", ("x", None), {}, pb_utils.TritonModelException, "not NoneType"),
    ("Tensor.from_dlpack", ("", None), {}, pb_utils.TritonModelException, "not NoneType"),
    ("Tensor.from_dlpack", (None, _ARRAY), {}, TypeError, "the name of a tensor"),
    *(("Logger.log", ("x", level), {}, TypeError, "level is") for level in (None, 1)),
    *(
        (f"Logger.log{kind}", (None,), {}, TypeError, "message is")
        for kind in ("", "_info", "_warn", "_error", "_verbose")
    ),
]


@pytest.mark.parametrize(("what", "arguments", "named", "kind", "words"), WRONG)
def test_arguments_that_triton_refuses(
    what: str, arguments: tuple[Any, ...], named: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """A wrong type is a TypeError, as with pybind11; a value that the constructor checks is Triton's exception."""
    with pytest.raises(kind, match=words) as caught:
        operator.attrgetter(what)(pb_utils)(*arguments, **named)
    assert caught.type is kind


def test_arguments_that_triton_takes() -> None:
    made: Any = pb_utils
    assert made.Tensor(b"x", _ARRAY).name() == "x"
    for more in (
        {"inputs": [], "requested_output_names": []},
        {"inputs": (), "requested_output_names": ("y",), "model_name": b"m", "request_id": b"1", "correlation_id": "s"},
        {"model_version": np.int64(1), "flags": np.uint8(1), "timeout": True, "parameters": None},
        {"trace": made.InferenceTrace(), "preferred_memory": made.PreferredMemory(made.TRITONSERVER_MEMORY_GPU, 1)},
    ):
        assert made.InferenceRequest(**{**_REQUEST, **more}).model_name() == "m"
    assert made.InferenceResponse([]).output_tensors() == made.InferenceResponse().output_tensors() == []


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


def test_parameters_of_a_response() -> None:
    assert pb_utils.InferenceResponse().parameters() == "{}"
    given = {"a": 1, "b": True, "c": "ä"}
    response = pb_utils.InferenceResponse([], parameters=given)
    given["d"] = 2
    assert json.loads(response.parameters()) == {"a": 1, "b": True, "c": "ä"}
    assert parameters_of(response) == {"a": 1, "b": True, "c": "ä"}
    with pytest.raises(
        pb_utils.TritonModelException, match="values to have type bool/int/str, found type <class 'bytes'>"
    ):
        pb_utils.InferenceResponse(parameters={"a": b""})  # type: ignore[dict-item]
