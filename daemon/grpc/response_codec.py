"""An inference answer as protobuf bytes: ModelInferResponse and ModelStreamInferResponse. Sans-I/O.

Written by hand, because an answer is the same few fields each time: what does not change between answers is built once, and the
tensors' bytes are not copied into a message object first.

    1 model_name | 2 model_version | 3 id | 4 parameters | 5 outputs, ... | 6 raw_output_contents, ...

Every output has an entry in raw_output_contents, also one that went to a region: an empty one, so that the indices agree.
Source: grpc_service.proto; protobuf's encoding specification.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

from tensord.shm.messages import Buffer, Content, Parameter, PreparedAnswer, Slice, placed

_double = struct.Struct("<d").pack
_UINT64 = (1 << 64) - 1
_FINAL = "triton_final_response"


def encode(
    prepared: PreparedAnswer,
    contents: tuple[Content, ...],
    model: str,
    client_id: str,
    view: Callable[[Slice], memoryview],
    final: bool | None = None,
) -> list[Buffer]:
    """A good answer as the pieces of a ModelInferResponse; slices of the response arena as they lie.

    Args:
      view: the bytes of a slice of the response arena.
      final: what ``triton_final_response`` says; None: not there, as in unary answers.
    """
    pieces: list[Buffer] = [_names(model, prepared.version)]
    raws: list[Buffer] = []
    if client_id:
        pieces.append(field(0x1A, client_id.encode()))
    if prepared.parameters:
        parameters = dict(prepared.parameters)
        if final is not None:
            parameters[_FINAL] = final
        pieces += [_parameter(key, value) for key, value in parameters.items()]
    elif final is not None:
        pieces.append(_IS_FINAL if final else _IS_NOT_FINAL)
    for tensor, place in placed(prepared.outputs, contents):
        pieces.append(_output(tensor.name, tensor.datatype, tensor.shape))
        content: Buffer = b""
        if type(place) is bytes:
            content = place
        elif type(place) is Slice:
            content = view(place)
        raws.append(raw(len(content)))
        raws.append(content)
    return pieces + raws


def streamed(parts: list[Buffer]) -> list[Buffer]:
    """A ModelStreamInferResponse around the pieces of a ModelInferResponse."""
    return [b"\x12" + varint(sum(map(len, parts))), *parts]


def streamed_error(message: str, client_id: str, model: str = "", final: bool | None = None) -> bytes:
    """A ModelStreamInferResponse with ``error_message``; ``model``: the one that raised it, "" when none was asked."""
    inner = field(0x0A, model.encode()) if model else b""
    if client_id:
        inner += field(0x1A, client_id.encode())
    if final is not None:
        inner += _parameter(_FINAL, final)
    return field(0x0A, message.encode()) + field(0x12, inner)


def empty_final(model: str, client_id: str) -> bytes:
    """No response, but that none comes any more: for clients that want to know when a decoupled model is done."""
    inner = field(0x0A, model.encode())
    if client_id:
        inner += field(0x1A, client_id.encode())
    return field(0x12, inner + _parameter(_FINAL, True))


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    if value < 128:
        return _BYTES[value]
    pieces = bytearray()
    while value >= 128:
        pieces.append(value & 127 | 128)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)


_BYTES = [bytes((value,)) for value in range(128)]


def field(tag: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return field_start(tag, len(content)) + content


@functools.lru_cache(4096)
def field_start(tag: int, byte_size: int) -> bytes:
    """What stands before the content of such a field."""
    return _BYTES[tag] + varint(byte_size)


@functools.lru_cache(4096)
def raw(byte_size: int) -> bytes:
    """What stands before a raw tensor."""
    return b"\x32" + varint(byte_size)


@functools.lru_cache(1024)
def _names(model: str, version: int) -> bytes:
    return field(0x0A, model.encode()) + field(0x12, str(version).encode())


@functools.lru_cache(4096)
def _output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    dims = b"".join(varint(size) for size in shape)
    inner = field(0x0A, name.encode()) + field(0x12, datatype.encode())
    return field(0x2A, inner + field(0x1A, dims) if dims else inner)


def _parameter(key: str, value: Parameter) -> bytes:
    """An entry of the parameters map: key 1, InferParameter 2."""
    if isinstance(value, bool):
        choice = b"\x08" + _BYTES[value]
    elif isinstance(value, int):
        choice = b"\x10" + varint(value & _UINT64)
    elif isinstance(value, float):
        choice = b"\x21" + _double(value)
    else:
        choice = field(0x1A, value.encode())
    return field(0x22, field(0x0A, key.encode()) + field(0x12, choice))


_IS_FINAL = _parameter(_FINAL, True)
_IS_NOT_FINAL = _parameter(_FINAL, False)
