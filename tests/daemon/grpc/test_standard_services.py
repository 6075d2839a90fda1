"""Questions of server reflection, and what is answered from the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tensord.daemon.front.status import INVALID_ARGUMENT, NOT_FOUND
from tensord.daemon.grpc.standard_services import Reflection, StandardServices
from tensord.protocol import health_pb2, reflection_pb2, reflection_v1alpha_pb2


@pytest.fixture(params=[reflection_pb2, reflection_v1alpha_pb2], ids=["v1", "v1alpha"])
def messages(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


def answer(messages: Any, **question: Any) -> Any:
    asked = messages.ServerReflectionRequest(host="h", **question)
    given = Reflection(messages, ("b.B", "a.A")).answer(asked)
    assert type(given) is messages.ServerReflectionResponse
    assert (given.valid_host, given.original_request) == ("h", asked)
    return given


def files(given: Any) -> list[str]:
    return [FileDescriptorProto.FromString(each).name for each in given.file_descriptor_response.file_descriptor_proto]


def test_services_in_order(messages: Any) -> None:
    listed = answer(messages, list_services="").list_services_response.service
    assert [service.name for service in listed] == ["a.A", "b.B"]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ({"file_by_filename": "model_config.proto"}, ["model_config.proto"]),
        ({"file_by_filename": "grpc_service.proto"}, ["grpc_service.proto", "model_config.proto"]),
        ({"file_by_filename": "grpc/health/v1/health.proto"}, ["grpc/health/v1/health.proto"]),
        ({"file_containing_symbol": "inference.GRPCInferenceService"}, ["grpc_service.proto", "model_config.proto"]),
        (
            {"file_containing_symbol": "inference.GRPCInferenceService.ModelInfer"},
            ["grpc_service.proto", "model_config.proto"],
        ),
        ({"file_containing_symbol": "inference.ModelEnsembling.Step"}, ["model_config.proto"]),
        ({"file_containing_symbol": "inference.ModelConfig.backend"}, ["model_config.proto"]),
        ({"file_containing_symbol": "inference.ModelConfig.scheduling_choice"}, ["model_config.proto"]),
        ({"file_containing_symbol": "inference.DataType"}, ["model_config.proto"]),
        ({"file_containing_symbol": "inference.ModelInstanceGroup.KIND_GPU"}, ["model_config.proto"]),
        ({"file_containing_symbol": "grpc.health.v1.Health.Watch"}, ["grpc/health/v1/health.proto"]),
        (
            {"file_containing_symbol": "grpc.reflection.v1.ServerReflection.ServerReflectionInfo"},
            ["grpc/reflection/v1/reflection.proto"],
        ),
        (
            {"file_containing_symbol": "grpc.reflection.v1alpha.ServerReflection"},
            ["grpc/reflection/v1alpha/reflection.proto"],
        ),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_files(messages: Any, question: dict[str, Any], expected: list[str]) -> None:
    """The file that was asked for comes first, and what it imports behind it."""
    assert files(answer(messages, **question)) == expected


def test_no_message_has_extensions(messages: Any) -> None:
    numbers = answer(messages, all_extension_numbers_of_type="inference.ModelConfig").all_extension_numbers_response
    assert (numbers.base_type_name, list(numbers.extension_number)) == ("inference.ModelConfig", [])


@pytest.mark.parametrize(
    ("question", "named"),
    [
        ({"file_by_filename": "other.proto"}, "'other.proto'"),
        ({"file_containing_symbol": "inference.Nothing"}, "'inference.Nothing'"),
        ({"file_containing_symbol": "inference.GRPCInferenceService.Nothing"}, "Nothing'"),
        ({"file_containing_symbol": ""}, "''"),
        ({"file_containing_symbol": "google.protobuf.FileDescriptorProto"}, "FileDescriptorProto'"),
        ({"all_extension_numbers_of_type": "inference.Nothing"}, "'inference.Nothing'"),
        (
            {"file_containing_extension": {"containing_type": "inference.ModelConfig", "extension_number": 5}},
            "'inference.ModelConfig, extension 5'",
        ),
        ({"file_containing_extension": {"containing_type": "a.B", "extension_number": 5}}, "'a.B, extension 5'"),
    ],
)
def test_what_is_not_there(messages: Any, question: dict[str, Any], named: str) -> None:
    error = answer(messages, **question).error_response
    assert error.error_code == NOT_FOUND
    assert named in error.error_message


def test_no_question(messages: Any) -> None:
    assert answer(messages).error_response.error_code == INVALID_ARGUMENT


async def test_a_watch_is_told_of_the_stop_that_comes_while_its_status_is_found_out() -> None:
    class Stopping:
        """Is told to stop while it finds out that all is well."""

        stopping = False

        async def unreadiness(self) -> str:
            found, self.stopping = self.stopping, True
            return "the server is stopping" if found else ""

    async def asked() -> AsyncIterator[Any]:
        yield health_pb2.HealthCheckRequest()

    services = StandardServices(Stopping())  # type: ignore[arg-type]
    told = [answer.status async for answer in services._watch(asked())]
    assert told == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
