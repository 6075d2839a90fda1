"""Limits how often fields are repeated in an encoded protobuf request message, before the message is parsed. Sans-I/O.

The bytes besides tensors and files are limited as well. Malformed messages are left to protobuf.
Source: protobuf's encoding specification.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tensord.daemon.front.entries import MAX_ENTRIES
from tensord.daemon.grpc.request_fields import varint
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import Buffer

#: How often each field of what is in a message may, all of them together: a tensor's parameters, the values of a setting.
MAX_INNER = 4096
#: Sizes in all shapes, and values of contents fields that are no packed numbers.
MAX_DIMS = MAX_VALUES = 65536
#: Packed numbers whose size on the wire depends on their value.
MAX_NUMBERS = 1 << 20
#: Bytes of a message besides its tensors and files.
MAX_TEXT = 1 << 20
#: A message of that size holds no more fields of two bytes than it may: it needs no check.
UNCOUNTED = 2 * MAX_ENTRIES
#: Message types and fields that hold tensor or file data, whose bytes do not count as text.
_CONTENTS = "inference.InferTensorContents"
_DATA = frozenset((_CONTENTS, "inference.ModelRepositoryParameter.bytes_param"))
_SHAPE = "inference.ModelInferRequest.InferInputTensor.shape"
_VARINT, _FIXED64, _DELIMITED, _START_GROUP, _END_GROUP, _FIXED32 = range(6)


@dataclass(slots=True)
class _Field:
    name: str
    most: int
    #: The kind of the message that the field holds; None: it holds a value.
    inner: _Kind | None = None
    #: Under which its packed numbers are counted, and how many there may be. "": it holds none.
    numbers: str = ""
    most_numbers: int = 0
    is_data: bool = False


@dataclass(slots=True)
class _Kind:
    name: str
    most: int
    fields: dict[int, _Field] = field(default_factory=dict)


def check(message: Buffer, descriptor: Any) -> None:
    """Raises InvalidArgument if a protobuf message repeats a field more often than this module's constants allow.

    Also raises InvalidArgument if the message has more than ``MAX_TEXT`` bytes besides tensors and files.
    ``message``: the encoded message, which may be malformed. ``descriptor``: the protobuf descriptor of the message's type.
    """
    size = len(message)
    if size <= UNCOUNTED:
        return
    counting = _Counting(message)
    try:
        counting.walk(0, size, _kind_of(descriptor))
    except IndexError:
        return
    if size - counting.data_size > MAX_TEXT:
        raise InvalidArgument(
            f"the request message has {size - counting.data_size} bytes besides its tensors, at most {MAX_TEXT} are allowed"
        )


class _Counting:
    def __init__(self, message: Buffer) -> None:
        self._message = memoryview(message)
        self._counts: dict[tuple[str, int], int] = {}
        self._numbers: dict[str, int] = {}
        self.data_size = 0
        #: Values that contents may hold which were not walked over.
        self._uncounted = 0

    def walk(self, at: int, end: int, kind: _Kind) -> None:
        message, counts = self._message, self._counts
        while at < end:
            tag, at = varint(message, at)
            number, wire = tag >> 3, tag & 7
            known = kind.fields.get(number)
            key = kind.name, number if known is not None else 0
            count = counts[key] = counts.get(key, 0) + 1
            if known is None:
                if count > kind.most:
                    raise InvalidArgument(f"more than {kind.most} unknown fields are given in {kind.name}")
            elif count > known.most:
                raise _too_many(known.name, known.most)
            if wire == _VARINT:
                at = varint(message, at)[1]
            elif wire == _DELIMITED:
                size, at = varint(message, at)
                if at + size > end:
                    raise IndexError
                if known is not None:
                    self._look_into(known, at, at + size)
                at += size
            elif wire in (_FIXED64, _FIXED32):
                at += 8 if wire == _FIXED64 else 4
            elif wire not in (_START_GROUP, _END_GROUP):  # what a group holds is counted here
                raise IndexError

    def _look_into(self, known: _Field, at: int, end: int) -> None:
        if known.is_data:
            self.data_size += end - at
            most = (end - at) // 2
            if known.inner is not None and self._uncounted + most <= MAX_VALUES:
                # Few fit into so many bytes, and to count them costs more than to read them.
                self._uncounted += most
                return
        if known.inner is not None:
            self.walk(at, end, known.inner)
        elif known.numbers:
            count = self._numbers.get(known.numbers, 0) + end - at
            if count > known.most_numbers:
                # Their bytes are more, but each has one that ends it.
                ends = np.count_nonzero(np.frombuffer(self._message[at:end], np.int8) >= 0)
                count += int(ends) - (end - at)
                if count > known.most_numbers:
                    raise _too_many(known.numbers, known.most_numbers)
            self._numbers[known.numbers] = count


def _too_many(name: str, most: int) -> InvalidArgument:
    hint = "; send them as raw_input_contents" if name.endswith("_contents") and name != "raw_input_contents" else ""
    return InvalidArgument(f"more than {most} {name} are given, at most {most} are taken{hint}")


@functools.cache
def _kind_of(descriptor: Any) -> _Kind:
    return _described(descriptor, MAX_ENTRIES, {})


def _described(descriptor: Descriptor, most: int, known: dict[str, _Kind]) -> _Kind:
    name = descriptor.full_name
    if name in known:
        return known[name]
    kind = known[name] = _Kind(name.removeprefix("inference."), most)
    for each in descriptor.fields:
        kind.fields[each.number] = _field_of(each, most, known)
    return kind


def _field_of(each: FieldDescriptor, most: int, known: dict[str, _Kind]) -> _Field:
    holder: Any = each.containing_type
    made = _Field(each.name, MAX_VALUES if holder.full_name == _CONTENTS else most)
    inner = each.message_type
    if inner is not None:
        made.inner = _described(inner, MAX_INNER, known)
        made.is_data = inner.full_name in _DATA
    elif each.full_name == _SHAPE:
        made.numbers, made.most_numbers = "sizes in shapes", MAX_DIMS
    elif holder.full_name == _CONTENTS and each.cpp_type not in (
        FieldDescriptor.CPPTYPE_FLOAT,
        FieldDescriptor.CPPTYPE_DOUBLE,
        FieldDescriptor.CPPTYPE_STRING,
    ):
        # All kinds of them have one bound, since each is one more way to send them.
        made.numbers, made.most_numbers = "numbers in typed_contents", MAX_NUMBERS
    made.is_data = made.is_data or each.full_name in _DATA
    return made
