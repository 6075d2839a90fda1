"""Finds every repeated field of every request message, by the messages' descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc import service_pb2

from tensord.daemon.grpc.response_codec import varint
from tests.daemon.grpc.requests import field

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
#: Of which some bytes are data that a step in Python is not taken for.
_FIXED = {FieldDescriptor.CPPTYPE_FLOAT: 4, FieldDescriptor.CPPTYPE_DOUBLE: 8}


@dataclass(frozen=True)
class Repeated:
    """A repeated field, and the way to it from the request message."""

    method: str
    descriptor: Descriptor
    path: tuple[FieldDescriptor, ...]
    #: Its numbers are written one behind the other.
    packed: bool = False

    def message(self, count: int) -> bytes:
        """Returns a request in which the field is there ``count`` times, and little else."""
        leaf = self.path[-1]
        if self.packed:
            content = field(leaf.number << 3 | 2, bytes(count * _FIXED.get(leaf.cpp_type, 1)))
        else:
            wire = 2 if leaf.cpp_type in (FieldDescriptor.CPPTYPE_MESSAGE, FieldDescriptor.CPPTYPE_STRING) else 0
            size = _FIXED.get(leaf.cpp_type, 0)
            wire = {4: 5, 8: 1}.get(size, wire)
            content = (varint(leaf.number << 3 | wire) + bytes(size or 1)) * count
        for outer in reversed(self.path[:-1]):
            content = varint(outer.number << 3 | 2) + varint(len(content)) + content
        return content

    @property
    def grows(self) -> bool:
        """Returns whether only the message's size bounds the field, because its packed numbers are copied unread."""
        return self.packed and self.path[-1].cpp_type in _FIXED

    def __str__(self) -> str:
        return f"{self.method}:{'.'.join(each.name for each in self.path)}{':packed' if self.packed else ''}"


def _repeated(
    method: str, top: Descriptor, here: Descriptor, before: tuple[FieldDescriptor, ...]
) -> Iterator[Repeated]:
    for each in here.fields:
        path = (*before, each)
        if each.is_repeated:
            yield Repeated(method, top, path)
            if each.cpp_type not in (FieldDescriptor.CPPTYPE_MESSAGE, FieldDescriptor.CPPTYPE_STRING):
                yield Repeated(method, top, path, packed=True)
        if each.message_type is not None:
            yield from _repeated(method, top, each.message_type, path)


#: Of all calls of the service.
REPEATED = [
    found for method in SERVICE.methods for found in _repeated(method.name, method.input_type, method.input_type, ())
]
