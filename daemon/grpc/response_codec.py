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
from collections.abc import Callable, Sequence

from shm.forms import no_view
from shm.messages import Completion, Inline, Parameter, Slice

Buffer = bytes | memoryview
_double = struct.Struct("<d").pack
_UINT64 = (1 << 64) - 1
_FINAL = "triton_final_response"


def encode(
    completion: Completion, model: str, client_id: str, view: Callable[[Slice], memoryview], final: bool | None = None
) -> list[Buffer]:
    """A good answer as the pieces of a ModelInferResponse; slices of the response arena as they lie.

    Args:
      view: the bytes of a slice of the response arena.
      final: what ``triton_final_response`` says; None: not there, as in unary answers.
    """
    pieces: list[Buffer] = [_names(model, completion.version)]
    raws: list[Buffer] = []
    if client_id:
        pieces.append(field(0x1A, client_id.encode()))
    if completion.parameters:
        parameters = dict(completion.parameters)
        if final is not None:
            parameters[_FINAL] = final
        pieces += [_parameter(key, value) for key, value in parameters.items()]
    elif final is not None:
        pieces.append(_IS_FINAL if final else _IS_NOT_FINAL)
    for tensor in completion.outputs:
        pieces.append(_output(tensor.name, tensor.datatype, tensor.shape))
        place = tensor.place
        content: Buffer = b""
        if type(place) is Inline:
            content = place.content
        elif type(place) is Slice:
            content = view(place)
        raws.append(_raw(len(content)))
        raws.append(content)
    return pieces + raws


class FormWriter:
    """Writes the good answers of one form: nothing of them but the id and the tensors' bytes is new."""

    __slots__ = ("_after", "_before", "_final", "_raws", "template")

    def __init__(self, template: Completion, model: str, final: bool | None) -> None:
        """``final``: as for ``encode``."""
        self.template = template
        self._final = final
        pieces = encode(template, model, "", no_view, final)
        outputs = len(template.outputs)
        self._before = bytes(pieces[0])
        self._after = b"".join(pieces[1 : len(pieces) - 2 * outputs])
        #: Of each output: whether its bytes are in the record.
        self._raws = [type(tensor.place) is Inline for tensor in template.outputs]

    def fits(self, template: Completion, final: bool | None) -> bool:
        """Whether answers of that form are like those."""
        return template is self.template and final is self._final

    def write(self, client_id: str, contents: Sequence[bytes]) -> list[Buffer]:
        """An answer. ``contents``: of the outputs that do not go to regions."""
        pieces: list[Buffer] = [self._before]
        if client_id:
            pieces.append(field(0x1A, client_id.encode()))
        pieces.append(self._after)
        rest = iter(contents)
        for inside in self._raws:
            content = next(rest) if inside else b""
            pieces += (_raw(len(content)), content)
        return pieces


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


def empty_final(model: str, version: int, client_id: str) -> bytes:
    """A last response without outputs, for clients that want to know when a decoupled model is done."""
    inner = _names(model, version)
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
    return _BYTES[tag] + varint(len(content)) + content


@functools.lru_cache(4096)
def _raw(byte_size: int) -> bytes:
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
