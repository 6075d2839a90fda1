"""Every message, field, enumeration and method is the published one: compared with the packages that others' clients use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2 as published_health
from grpc_reflection.v1alpha import reflection_pb2 as published_reflection
from tritonclient.grpc import model_config_pb2 as published_config
from tritonclient.grpc import service_pb2 as published_service

from tensord.protocol import grpc_service_pb2, health_pb2, model_config_pb2, reflection_pb2, reflection_v1alpha_pb2

PAIRS = {
    "model_config": (model_config_pb2, published_config),
    "grpc_service": (grpc_service_pb2, published_service),
    "health": (health_pb2, published_health),
    "reflection_v1alpha": (reflection_v1alpha_pb2, published_reflection),
    # grpcio-reflection has no other; v1 is v1alpha in another package.
    "reflection": (reflection_pb2, published_reflection),
}
#: Name of what is defined -> all that is said of it.
Facts = dict[str, tuple[Any, ...]]


def facts(file: Any) -> Facts:
    """Returns what a protocol file defines, by names without the package's prefix."""
    return {name.removeprefix(f"{file.package}."): said for name, said in _of_file(file)}


def _of_file(file: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for enumeration in file.enum_types_by_name.values():
        yield from _of_enumeration(enumeration)
    for message in file.message_types_by_name.values():
        yield from _of_message(message)
    for service in file.services_by_name.values():
        yield service.full_name, ("service", service.index)
        for method in service.methods:
            types = [_local(file, each.full_name) for each in (method.input_type, method.output_type)]
            streams = (method.client_streaming, method.server_streaming)
            yield f"{service.full_name}.{method.name}", ("method", method.index, *types, *streams)


def _of_message(message: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    options = message.GetOptions()
    yield message.full_name, ("message", options.map_entry, options.deprecated, len(message.extension_ranges))
    for oneof in message.oneofs:
        yield oneof.full_name, ("oneof", oneof.index, *(field.name for field in oneof.fields))
    for field in message.fields:
        yield field.full_name, ("field", *_of_field(message.file, field))
    for enumeration in message.enum_types:
        yield from _of_enumeration(enumeration)
    for nested in message.nested_types:
        yield from _of_message(nested)


def _of_field(file: Any, field: FieldDescriptor) -> tuple[Any, ...]:
    kind = field.message_type or field.enum_type
    default = None if field.message_type is not None or field.is_repeated else field.default_value
    return (
        *(field.name, field.number, field.index, field.type, field.is_repeated, field.is_required, field.is_packed),
        *(field.has_presence, field.json_name, _local(file, kind.full_name) if kind is not None else None, default),
        *(field.containing_oneof.name if field.containing_oneof is not None else None, field.GetOptions().deprecated),
    )


def _of_enumeration(enumeration: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    yield enumeration.full_name, ("enumeration", enumeration.is_closed)
    for value in enumeration.values:
        yield f"{enumeration.full_name}.{value.name}", ("value", value.number, value.index)


def _local(file: Any, name: str) -> str:
    return name.removeprefix(f"{file.package}.")


@pytest.mark.parametrize("name", PAIRS)
def test_everything_is_as_published(name: str) -> None:
    ours, theirs = (facts(module.DESCRIPTOR) for module in PAIRS[name])
    assert {key: said for key, said in ours.items() if theirs.get(key) != said} == {}
    assert theirs.keys() - ours.keys() == set()


def test_packages() -> None:
    assert {name: pair[0].DESCRIPTOR.package for name, pair in PAIRS.items()} == {
        "model_config": "inference",
        "grpc_service": "inference",
        "health": "grpc.health.v1",
        "reflection_v1alpha": "grpc.reflection.v1alpha",
        "reflection": "grpc.reflection.v1",
    }


def test_the_client_that_is_compared_with_is_the_whole_one() -> None:
    """Its stubs have no method that ours lack."""
    stub = vars(tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceServicer)
    methods = {name for name in stub if not name.startswith("_")}
    assert methods == set(grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name)
