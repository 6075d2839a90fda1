"""The descriptor pool of tensord's protobuf messages. Each module NAME_pb2 adds the messages of one .proto file to the pool.

The pool is not protobuf's default pool, in which each name can be registered only once. Packages that models may import, such
as tritonclient and kserve, register some of the same names in the default pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

POOL = DescriptorPool()


def define(module: dict[str, Any]) -> None:
    """Adds the messages of a .proto file to ``POOL``, the pool of all protobuf messages of tensord.

    ``module`` is the variables of the Python module NAME_pb2. The file NAME.binpb beside it is a serialized
    FileDescriptorProto, as protoc makes it. DESCRIPTOR, the message classes and the enumerations are added to ``module``.
    """
    name = module["__name__"].rpartition(".")[2].removesuffix("_pb2")
    file = POOL.AddSerializedFile(Path(__file__).with_name(f"{name}.binpb").read_bytes())
    module["DESCRIPTOR"] = file
    for name, enumeration in file.enum_types_by_name.items():
        module[name] = EnumTypeWrapper(enumeration)
        module.update((value.name, value.number) for value in enumeration.values)
    for name, message in file.message_types_by_name.items():
        module[name] = _class_of(message, module["__name__"])


def _class_of(message: Descriptor, module: str) -> type[Message]:
    made = GetMessageClass(message)
    made.__module__ = module
    for nested in message.nested_types:
        # Protobuf in C finds nested classes by itself; protobuf in Python, where there is no other, does not.
        setattr(made, nested.name, _class_of(nested, module))
    return made
