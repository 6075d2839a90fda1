"""The interface that Triton Python models import, used as they use it."""

from __future__ import annotations

import json

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
    """Whatever file a name is defined in."""
    names = "Tensor TritonError TritonModelException ModelConfig np_to_triton_dtype get_input_config_by_name"
    assert all(hasattr(pb_utils, name) for name in names.split())
