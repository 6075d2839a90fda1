"""The head of a ModelInferRequest as values: everything but its id and its raw tensors, read by protobuf and checked. Sans-I/O.

What belongs to the protocol is refused here; what only the model's configuration can tell is left to the worker.
Source: grpc_service.proto; texts as recorded against a real Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from tensord.daemon.grpc import counts
from tensord.daemon.grpc.request_tensors import content, requested
from tensord.daemon.submit.model_table import ModelTable, parse_version
from tensord.daemon.submit.placement import InferenceRequest, InputContent
from tensord.daemon.submit.scheduling import KEYS, UNSCHEDULED, Scheduling
from tensord.protocol import grpc_service_pb2
from tensord.shm.datatypes import wire_name
from tensord.shm.errors import InvalidArgument, ServingError, Unsupported
from tensord.shm.messages import MAX_SEQUENCE_ID, Parameter, RegionSlice, RequestedOutput

_INT64 = (1 << 63) - 1


@dataclass(slots=True)
class DecodedHead:
    """What a request says beside its raw tensors and its id. Shared between requests: nothing of it changes any more."""

    model: str
    version: int
    #: Name, datatype, shape, and content where it is no raw tensor.
    inputs: list[tuple[str, str, tuple[int, ...], InputContent | None]] = field(default_factory=list)
    #: How many raw tensors belong to it.
    raw_count: int = 0
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: dict[str, Parameter] = field(default_factory=dict)
    scheduling: Scheduling = UNSCHEDULED
    #: A parameter says when it is to be run, be it what would hold without it.
    schedules: bool = False
    #: The client wants a last, empty response where the model's last one does not say that it is.
    empty_final: bool = False

    @property
    def is_raw(self) -> bool:
        """Whether all tensors are raw, or in regions: then it says nothing that belongs to one request alone."""
        return all(content is None or type(content) is RegionSlice for _, _, _, content in self.inputs)

    def request(self, client_id: str, raws: Sequence[InputContent], scheduling: Scheduling) -> InferenceRequest:
        """With the raw tensors where they belong. Raises InvalidArgument: too many, or too few."""
        if len(raws) > self.raw_count:
            raise InvalidArgument(
                f"{len(raws)} raw_input_contents are given for model '{self.model}', its inputs take {self.raw_count}"
            )
        inputs: list[tuple[str, str, tuple[int, ...], InputContent]] = []
        number = 0
        for name, datatype, shape, source in self.inputs:
            if source is None:
                if number == len(raws):
                    raise InvalidArgument(
                        f"unable to find data for input tensor '{name}' for model '{self.model}' in request."
                    )
                source = raws[number]
                number += 1
            inputs.append((name, datatype, shape, source))
        return InferenceRequest(self.model, self.version, inputs, self.outputs, self.parameters, client_id, scheduling)


def decode_head(head: bytes, has_raw: bool, table: ModelTable) -> DecodedHead:
    """Everything but the raw tensors. ``has_raw``: tensors came as raw_input_contents, so none may come typed.

    Raises: NotFound, InvalidArgument: no such model or version.  InvalidArgument: not of the protocol's form.
    """
    counts.check(head, grpc_service_pb2.ModelInferRequest.DESCRIPTOR)
    try:
        request = grpc_service_pb2.ModelInferRequest.FromString(head)
    except DecodeError:
        raise InvalidArgument("failed to parse the request message") from None
    model = request.model_name
    decoded = DecodedHead(model, read_version(model, request.model_version))
    table.expect(model, decoded.version)
    for key, value in request.parameters.items():
        _read_parameter(key, value, decoded)
    for entry in request.inputs:
        shape = tuple(entry.shape)
        entry.datatype = wire_name(entry.datatype)
        if any(size < 0 for size in shape):
            shown = ",".join(map(str, shape))
            raise InvalidArgument(
                f"All input dimensions should be specified for input '{entry.name}' for model '{model}', got [{shown}]"
            )
        source = content(entry, shape, has_raw, model)
        decoded.raw_count += source is None
        decoded.inputs.append((entry.name, entry.datatype, shape, source))
    decoded.outputs = tuple([requested(entry) for entry in request.outputs])
    return decoded


def read_version(model: str, text: str) -> int:
    """A version as text; "" is the newest. Raises InvalidArgument: not a positive number.  NotFound: 0."""
    if not text:
        return 0
    digits = text[1:] if text[0] == "-" else text
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidArgument(
            f"failed to get model version from specified version string '{text[:64]}' (details: stol), "
            "version should be an integral value > 0"
        )
    if text[0] == "-":
        raise InvalidArgument(
            f"invalid model version specified '{text[:64]}' , version should be an integral value > 0"
        )
    return parse_version(model, text)


# ---------------------------------------------------------------------------------------------------------- parameters


def decode_scheduling(parameters: bytes) -> Scheduling | None:
    """What the fields of a message say that hold such parameters alone. None: ``decode_head`` is to read them."""
    try:
        given = grpc_service_pb2.ModelInferRequest.FromString(parameters).parameters
        if KEYS.issuperset(given):
            decoded = DecodedHead("", 0)
            for key, value in given.items():
                _read_parameter(key, value, decoded)
            return decoded.scheduling
    except (DecodeError, ServingError):
        pass
    return None


def _read_parameter(key: str, value: Any, decoded: DecodedHead) -> None:
    kind = value.WhichOneof("parameter_choice")
    match key:
        case "sequence_id" | "sequence_start" | "sequence_end" | "priority" | "timeout":
            decoded.schedules = True
            field, read = _SCHEDULING[key]
            decoded.scheduling = decoded.scheduling._replace(**{field: read(key, value, kind)})
        case "triton_enable_empty_final_response":
            decoded.empty_final = _bool(key, value, kind)
        case _ if key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                "starting with 'triton_' are allowed: triton_enable_empty_final_response"
            )
        case _:
            if kind not in ("int64_param", "bool_param", "string_param", "double_param"):
                raise InvalidArgument(
                    f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param."
                )
            decoded.parameters[key] = getattr(value, kind)


def _bool(key: str, value: Any, kind: str | None) -> bool:
    if kind != "bool_param":
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected bool_param.")
    return bool(value.bool_param)


def _priority(key: str, value: Any, kind: str | None) -> int:
    if kind not in ("int64_param", "uint64_param"):
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected int64_param or uint64_param.")
    number: int = getattr(value, kind)
    if not 0 <= number <= _INT64:
        raise InvalidArgument(f"invalid value for '{key}', expected value >= 0.")
    return number


def _timeout(key: str, value: Any, kind: str | None) -> int:
    if kind != "int64_param":
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected int64_param.")
    if value.int64_param < 0:
        raise InvalidArgument(f"invalid value for '{key}', expected value >= 0.")
    return int(value.int64_param)


def _sequence_id(key: str, value: Any, kind: str | None) -> int | str:
    if kind == "string_param":
        text: str = value.string_param
        if len(text.encode()) > MAX_SEQUENCE_ID:
            raise Unsupported(f"string correlation ID cannot be longer than {MAX_SEQUENCE_ID} characters")
        return text
    if kind not in ("int64_param", "uint64_param"):
        raise InvalidArgument(
            f"invalid value type for '{key}' parameter, expected int64_param, uint64_param or string_param."
        )
    number: int = getattr(value, kind)
    if number < 0:
        raise InvalidArgument(f"invalid value for '{key}', expected value >= 0.")
    return number


#: Name of a parameter -> the field of Scheduling that it fills, and what reads it.
_SCHEDULING: dict[str, tuple[str, Callable[[str, Any, str | None], Any]]] = {
    "priority": ("priority", _priority),
    "timeout": ("timeout_us", _timeout),
    "sequence_id": ("sequence_id", _sequence_id),
    "sequence_start": ("sequence_start", _bool),
    "sequence_end": ("sequence_end", _bool),
}
