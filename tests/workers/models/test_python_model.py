"""The other side of a Triton Python model: what it is given, and what becomes of its responses."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tensord.config.model_config import ModelConfig, complete, parse_pbtxt
from tensord.shm.errors import Internal, InvalidArgument, NotFound
from tensord.shm.messages import RequestedOutput
from tensord.workers.calls.caller import ModelPort
from tensord.workers.models.execution import Execution
from tensord.workers.models.python_model import PythonModel, PythonVersion, auto_complete
from tensord.workers.python_backend import interface as pb_utils
from tensord.workers.tensors.signature import signature
from tests.workers.made_requests import request_of

CONFIG = """
    name: "m" backend: "python" max_batch_size: 4
    input { name: "x" data_type: TYPE_INT32 dims: [ 2 ] reshape { shape: [ 1, 2 ] } }
    output { name: "y" data_type: TYPE_INT32 dims: [ 2 ] reshape { shape: [ 1, 2 ] } }
    output { name: "z" data_type: TYPE_FP32 dims: [ 1 ] }
    parameters { key: "colour" value { string_value: "blue" } }
"""


def config(more: str = "") -> ModelConfig:
    message = parse_pbtxt(CONFIG + more, "m")
    complete(message)
    return message


def model_of(source: type, more: str = "") -> PythonModel:
    module: Any = ModuleType("made")
    module.TritonPythonModel = source
    message = config(more)
    described = signature(message, {}, {})
    shared = PythonVersion(module, message, described, 3, "/models/m", "CPU", ModelPort("m", 3, None))
    model = PythonModel(shared, "m_0_0")
    model.initialize()
    return model


def test_what_a_model_is_given() -> None:
    seen: dict[str, Any] = {}

    class Model:
        def initialize(self, args: dict[str, str]) -> None:
            seen.update(args)

        def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
            (request,) = requests
            seen.update(
                id=request.request_id(),
                correlation=request.correlation_id(),
                flags=request.flags(),
                timeout=request.timeout(),
                parameters=json.loads(request.parameters()),
                wanted=request.requested_output_names(),
                inputs={tensor.name(): tensor.as_numpy().shape for tensor in request.inputs()},
                cancelled=request.is_cancelled(),
            )
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy() + 1)])]

        def finalize(self) -> None:
            seen["finalized"] = True

    model = model_of(Model)
    fields: dict[str, Any] = {
        "client_id": "me",
        "sequence_id": "s",
        "sequence_end": True,
        "timeout_us": 9,
        "parameters": {"a": 1.5},
    }
    request = request_of({"x": np.zeros((3, 1, 2), np.int32)}, 3, outputs={"y": RequestedOutput("y")}, **fields)
    execution = Execution([request], 0)
    model.execute(execution)
    model.close()
    (result,) = execution.results
    assert isinstance(result, dict)
    assert result["y"].shape == (3, 2)
    assert json.loads(seen.pop("model_config"))["parameters"] == {"colour": {"string_value": "blue"}}
    assert seen == {
        "model_name": "m",
        "model_version": "3",
        "model_repository": "/models/m",
        "model_instance_name": "m_0_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
        "id": "me",
        "correlation": "s",
        "flags": 2,
        "timeout": 9,
        "parameters": {"a": 1.5},
        "wanted": ["y"],
        "inputs": {"x": (3, 1, 2)},
        "cancelled": False,
        "finalized": True,
    }


class Careless:
    """Answers with an error, and with outputs of other datatypes and shapes than CONFIG declares."""

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [
            pb_utils.InferenceResponse(error=pb_utils.TritonError("gone", pb_utils.TritonError.NOT_FOUND)),
            pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(7))]),
            pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((2, 1, 2), np.int32))]),
            pb_utils.InferenceResponse(),
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, np.zeros((1, 1, 2), np.int32)) for name in ("y", "more")]
            ),
        ]


def test_responses_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    """An error of one response is that request's. What is not as declared is sent, and warned of once; extra outputs go."""
    execution = Execution([request_of({}) for _ in range(5)], 0)
    model_of(Careless).execute(execution)
    error, *answered = execution.results
    assert isinstance(error, NotFound)
    shown: list[dict[str, Any]] = []
    for result in answered:
        assert isinstance(result, dict)
        shown.append({name: (str(array.dtype), array.shape) for name, array in result.items()})
    assert shown == [{"y": ("float64", (7,))}, {"y": ("int32", (2, 2))}, {}, {"y": ("int32", (1, 2))}]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "output 'y' is computed as FP64[7], declared as INT32[1, 1, 2]" in warning
    assert "strict_outputs" in warning


def test_a_model_may_be_strict() -> None:
    execution = Execution([request_of({}) for _ in range(5)], 0)
    strict = 'parameters { key: "strict_outputs" value { string_value: "true" } }'
    model_of(Careless, strict).execute(execution)
    _, datatype, rows, empty, good = execution.results
    for wrong, made in ((datatype, "FP64[7]"), (rows, "INT32[2, 1, 2]")):
        assert isinstance(wrong, Internal)
        assert wrong.message == f"model 'm': output 'y' is computed as {made}, declared as INT32[1, 1, 2]"
    assert empty == {}
    assert isinstance(good, dict)


def test_auto_complete() -> None:
    class Model:
        @staticmethod
        def auto_complete_config(given: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
            given.add_output({"name": "w", "data_type": "TYPE_BF16", "dims": [-1]})
            return given

    module: Any = ModuleType("made")
    module.TritonPythonModel = Model
    completed = auto_complete(module, config(), ModelPort("m", 3, None))
    assert [output.name for output in completed.output] == ["y", "z", "w"]
    assert list(completed.input[0].reshape.shape) == [1, 2]
    Model.auto_complete_config = staticmethod(lambda given: pb_utils.ModelConfig({"nonsense": 1}))  # type: ignore[method-assign]
    with pytest.raises(InvalidArgument, match="auto_complete_config"):
        auto_complete(module, config(), ModelPort("m", 3, None))


@pytest.mark.parametrize("trouble", [ValueError("at the end"), SystemExit(1)])
def test_finalize_that_fails_is_only_logged(caplog: pytest.LogCaptureFixture, trouble: BaseException) -> None:
    class Model:
        def finalize(self) -> None:
            raise trouble

    model_of(Model).close()
    assert "finalize of model 'm_0_0' failed" in caplog.text
