"""The interface that Triton Python models import, used as they use it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tensord.workers.python_backend import interface as pb_utils


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


def test_arguments_that_triton_refuses() -> None:
    """A wrong type is a TypeError, as with pybind11; a value that the constructor checks is Triton's exception."""
    array = np.zeros(1, np.float32)
    good = pb_utils.Tensor("x", array)
    assert pb_utils.Tensor(b"x", array).name() == "x"  # type: ignore[arg-type]
    made: Any = pb_utils
    for wrong in (
        lambda: made.Tensor(None, array),
        lambda: made.InferenceResponse([1]),
        lambda: made.InferenceRequest(inputs=[good], requested_output_names=["y"]),
        lambda: made.InferenceRequest(model_name=None),
        lambda: made.InferenceRequest(model_name="m", inputs=["x"]),
        lambda: made.Logger.log("x", None),
        lambda: made.Logger.log(None),
    ):
        with pytest.raises(TypeError):
            wrong()
    for wrong, words in (
        (lambda: made.InferenceResponse([good, None]), "Output tensor for inference response should not be empty."),
        (lambda: made.InferenceRequest(model_name="m", inputs=[None]), "Input tensor for request with id ''"),
    ):
        with pytest.raises(pb_utils.TritonModelException, match=words):
            wrong()
