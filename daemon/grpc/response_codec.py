"""Encodes inference answers as protobuf bytes: ModelInferResponse and ModelStreamInferResponse. Sans-I/O.

An encoded answer is a list of byte pieces, so that the bytes of its tensors are not copied. If several answers differ only in
the id and the bytes of the tensors, the remaining fields are encoded once for all of these answers.
Every output has an entry in raw_output_contents. The entry is empty if the output was written to a region.
Source: grpc_service.proto; protobuf's encoding specification.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from tensord.protocol.grpc_service_pb2 import InferParameter, ModelInferResponse, ModelStreamInferResponse
from tensord.shm.messages import Buffer, Content, Parameter, PreparedAnswer, Slice

_FINAL = "triton_final_response"
_MODEL_NAME, _MODEL_VERSION, _ID, _RAW, _INFER_RESPONSE = 0x0A, 0x12, 0x1A, 0x32, 0x12


class AnswerLayout:
    """Encodes answers that differ only in id and tensors."""

    __slots__ = ("_begin", "_owns", "_prepared", "_rest", "_whole")

    def __init__(self, prepared: PreparedAnswer, model: str, final: bool | None = None) -> None:
        """Encodes the part that all answers of ``model`` with the outputs in ``prepared`` share.

        ``final``: the value of the parameter ``triton_final_response``. If it is None, the answers lack that parameter.
        """
        self._prepared = prepared
        name, version = model.encode(), str(prepared.version).encode()
        self._begin = field_start(_MODEL_NAME, len(name)) + name + field_start(_MODEL_VERSION, len(version)) + version
        outputs = b"".join([_output(tensor.name, tensor.datatype, tensor.shape) for tensor in prepared.outputs])
        if prepared.parameters:
            parameters = prepared.parameters if final is None else {**prepared.parameters, _FINAL: final}
            outputs = ModelInferResponse(parameters=_parameters(parameters)).SerializeToString() + outputs
        elif final is not None:
            outputs = _IS_FINAL[final] + outputs
        #: Parameters and descriptions of the outputs.
        self._rest = outputs
        #: The whole head of an answer without an id.
        self._whole = self._begin + self._rest
        #: Which outputs are in the answer; those that are not went to regions. None: all of them.
        owns = [tensor.region is None for tensor in prepared.outputs]
        self._owns = None if all(owns) else owns

    def pieces(
        self, client_id: bytes, contents: tuple[Content, ...], view: Callable[[Slice], memoryview]
    ) -> list[Buffer]:
        """Encodes one answer as pieces of a ModelInferResponse.

        Tensors in the response arena are not copied: their pieces are views of the arena.
        Args:
          client_id: the id of the request.
          contents: the outputs, without those that were written to a region.
          view: returns the bytes of a slice of the response arena.
        """
        pieces: list[Buffer] = [self._whole]
        if client_id:
            pieces = [self._begin, field_start(_ID, len(client_id)), client_id, self._rest]
        if self._owns is not None:
            own = iter(contents)
            contents = tuple([next(own) if owned else b"" for owned in self._owns])
        for content in contents:
            tensor: Buffer = view(content) if type(content) is Slice else content  # type: ignore[assignment]
            pieces += (field_start(_RAW, len(tensor)), tensor)
        return pieces


@functools.lru_cache(4096)
def _output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    message = ModelInferResponse()
    message.outputs.add(name=name, datatype=datatype, shape=shape)
    return message.SerializeToString()


def _parameters(given: Mapping[str, Parameter]) -> dict[str, InferParameter]:
    found: dict[str, InferParameter] = {}
    for key, value in given.items():
        if isinstance(value, bool):
            found[key] = InferParameter(bool_param=value)
        elif isinstance(value, int):
            found[key] = InferParameter(int64_param=value)
        elif isinstance(value, float):
            found[key] = InferParameter(double_param=value)
        else:
            found[key] = InferParameter(string_param=value)
    return found


_IS_FINAL = [ModelInferResponse(parameters=_parameters({_FINAL: final})).SerializeToString() for final in (False, True)]


# ------------------------------------------------------------------------------------------------------------ streams


def streamed(parts: list[Buffer]) -> list[Buffer]:
    """Puts a ModelInferResponse, which is given in pieces, into a ModelStreamInferResponse."""
    return [field_start(_INFER_RESPONSE, sum(map(len, parts))), *parts]


def streamed_error(message: str, client_id: str, model: str = "", final: bool | None = None) -> bytes:
    """Encodes a ModelStreamInferResponse with the error ``message``, for the request whose id is ``client_id``.

    ``final``: the value of the parameter ``triton_final_response``. If it is None, the response lacks that parameter.
    """
    parameters = {} if final is None else _parameters({_FINAL: final})
    inner = ModelInferResponse(model_name=model, id=client_id, parameters=parameters)
    return ModelStreamInferResponse(error_message=message, infer_response=inner).SerializeToString()


def empty_final(model: str, client_id: str) -> bytes:
    """Encodes the empty last response of a model that gives several responses."""
    inner = ModelInferResponse(model_name=model, id=client_id, parameters=_parameters({_FINAL: True}))
    return ModelStreamInferResponse(infer_response=inner).SerializeToString()


# ------------------------------------------------------------------------------------------------------ length-delimited


@functools.lru_cache(8192)
def field_start(tag: int, byte_size: int) -> bytes:
    """Encodes the start of a length-delimited field: its one-byte tag and its size."""
    return bytes((tag,)) + varint(byte_size)


def varint(value: int) -> bytes:
    """Encodes ``value`` as a varint: seven bits a byte, the lowest first."""
    pieces = bytearray()
    while value >= 128:
        pieces.append(value & 127 | 128)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)
