"""Our messages live beside those of other packages, whichever come first, and whichever way protobuf is built."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OURS = "from tensord.protocol import grpc_service_pb2, health_pb2, model_config_pb2, reflection_pb2, reflection_v1alpha_pb2"
#: Package -> how its messages of the same names are imported. Without a filter: kserve and what it brings may warn.
THEIRS = {
    "tritonclient": "from tritonclient.grpc import service_pb2, model_config_pb2 as config",
    "kserve": "from kserve.protocol.grpc import grpc_predict_v2_pb2 as service_pb2",
    "grpcio-health-checking": "from grpc_health.v1 import health_pb2 as health",
    "grpcio-reflection": "from grpc_reflection.v1alpha import reflection_pb2 as reflection",
}
CHECK = """
from google.protobuf import descriptor_pool
from tensord.protocol.pool import POOL
assert POOL is not descriptor_pool.Default()
said = grpc_service_pb2.ModelInferRequest(model_name="m", inputs=[{"name": "x", "shape": [2]}], raw_input_contents=[b"ab"])
said.inputs[0].parameters["k"].int64_param = 3
again = grpc_service_pb2.ModelInferRequest.FromString(said.SerializeToString())
assert again == said and type(again.inputs[0]) is grpc_service_pb2.ModelInferRequest.InferInputTensor
config = model_config_pb2.ModelConfig(name="m", instance_group=[{"kind": model_config_pb2.ModelInstanceGroup.KIND_GPU}])
assert grpc_service_pb2.ModelConfigResponse(config=config).config.instance_group[0].kind == 1
assert model_config_pb2.TYPE_FP32 == model_config_pb2.DataType.Value("TYPE_FP32") == 11
assert model_config_pb2.ModelConfig.__module__ == "tensord.protocol.model_config_pb2"
if "service_pb2" in globals():
    theirs = service_pb2.ModelInferRequest.FromString(said.SerializeToString())
    assert theirs.SerializeToString() == said.SerializeToString() and type(theirs) is not type(said)
"""


def run(*source: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(source)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", THEIRS)
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_beside_another_package(package: str, first: str) -> None:
    imports = [OURS, THEIRS[package]]
    run(*(imports if first == "ours" else reversed(imports)), OURS, CHECK)


def test_protobuf_in_python() -> None:
    """The pool also works where there is no wheel of protobuf in C."""
    run(OURS, CHECK, PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python")


def test_no_warning_and_nothing_else() -> None:
    """Importing them brings no gRPC library and no array library."""
    run(
        "import sys, warnings",
        "warnings.simplefilter('error')",
        OURS,
        CHECK,
        "assert not {'grpc', 'numpy', 'tritonclient', 'grpc_health', 'grpc_reflection'} & set(sys.modules)",
    )
