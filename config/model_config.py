"""A model's configuration: Triton's published ModelConfig message, read from config.pbtxt, completed, checked and printed.

The compiled message comes with tritonclient; no parser of ours. Its one rule: whatever an operator or a client wrote is refused
here, with the model and the place named, before any process acts on it. The message type has no static type of its own, hence
``ModelConfig`` is ``Any``.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import msgspec
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from shm.datatypes import MAX_RANK, from_model_config
from shm.errors import InvalidArgument, Unsupported

ModelConfig: TypeAlias = Any

#: Back ends this server runs.
BACKENDS = ("jax", "python")
#: Each is a thread of the worker.
MAX_INSTANCES = 256
#: Triton's: how long a sequence may be silent when its model does not say.
_SEQUENCE_IDLE_US = 1_000_000
_MODULE = "tritonclient.grpc.model_config_pb2"


@functools.cache
def model_config_pb2() -> ModuleType:
    """The compiled message module, loaded by its path: importing its package would pull grpc and numpy into a process that
    needs neither."""
    if (loaded := sys.modules.get(_MODULE)) is not None:
        return loaded
    package = importlib.util.find_spec("tritonclient")
    if package is None or not package.submodule_search_locations:
        raise ImportError("the ModelConfig message comes with tritonclient[grpc], which is not installed")
    path = Path(package.submodule_search_locations[0], "grpc", "model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    if spec is None or spec.loader is None:
        raise ImportError("the ModelConfig message of tritonclient[grpc] cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def empty(model_name: str = "") -> ModelConfig:
    """A configuration that says nothing but the name."""
    return model_config_pb2().ModelConfig(name=model_name)


# -------------------------------------------------------------------------------------------------------------- reading


def parse_pbtxt(text: str, model_name: str) -> ModelConfig:
    """Reads a config.pbtxt.

    Raises: InvalidArgument: names the model, the line and the column, and what protobuf expected there.
    """
    message = empty()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        reason = str(error).removeprefix(f"{line}:{column} : ")
        where = f"line {line}, column {column}: " if line is not None else ""
        raise InvalidArgument(f"config.pbtxt of model '{model_name}': {where}{reason}") from None
    except UnicodeError:
        raise InvalidArgument(f"config.pbtxt of model '{model_name}': a string in it is not UTF-8") from None
    return message


def parse_json(text: str, model_name: str) -> ModelConfig:
    """Reads a configuration in JSON, as the repository's load request carries it. Raises InvalidArgument, naming the model."""
    # Imported late: only processes that take overrides pay for it.
    from google.protobuf import json_format

    if not text.lstrip().startswith("{"):  # protobuf takes an empty list for an empty message
        raise InvalidArgument(f"configuration of model '{model_name}': expected a JSON object")
    message = empty()
    try:
        json_format.Parse(text, message)
    except json_format.ParseError as error:
        raise InvalidArgument(f"configuration of model '{model_name}': {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise InvalidArgument(f"configuration of model '{model_name}': nested too deeply") from None
    return message


def from_bytes(content: bytes) -> ModelConfig:
    """Decodes the serialised message that ``shm.messages.Load`` carries. Raises InvalidArgument: it is none."""
    message = empty()
    try:
        message.ParseFromString(content)
    except DecodeError:
        raise InvalidArgument("malformed model configuration") from None
    return message


# ------------------------------------------------------------------------------------------------------------- defaults


def complete(message: ModelConfig, gpu: int | None = None) -> None:
    """Fills in what Triton fills in, in place; what is given stays. ``gpu`` is the device it runs on, None the CPU.

    Inputs, outputs and ``max_batch_size`` are the model's to say, so call this after they are known.
    """
    if not message.HasField("version_policy"):
        message.version_policy.latest.num_versions = 1
    if message.HasField("ensemble_scheduling"):
        message.platform = message.platform or "ensemble"
        message.model_transaction_policy.SetInParent()
        return
    if not message.default_model_filename:
        message.default_model_filename = "model.py"
    optimization = message.optimization
    for pinned in (optimization.input_pinned_memory, optimization.output_pinned_memory):
        if not pinned.enable:
            pinned.enable = True
    _complete_scheduling(message)
    _complete_instances(message, gpu)


def _complete_scheduling(message: ModelConfig) -> None:
    whole_batch = [message.max_batch_size] if message.max_batch_size > 0 else []
    if message.HasField("dynamic_batching"):
        if not message.dynamic_batching.preferred_batch_size:
            message.dynamic_batching.preferred_batch_size.extend(whole_batch)
    elif message.HasField("sequence_batching"):
        sequences = message.sequence_batching
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or _SEQUENCE_IDLE_US
        if sequences.WhichOneof("strategy_choice") is None:
            sequences.direct.SetInParent()
        if sequences.HasField("oldest") and not sequences.oldest.preferred_batch_size:
            sequences.oldest.preferred_batch_size.extend(whole_batch)


def _complete_instances(message: ModelConfig, gpu: int | None) -> None:
    kinds = model_config_pb2().ModelInstanceGroup
    if not message.instance_group:
        message.instance_group.add(name=message.name)
    for index, group in enumerate(message.instance_group):
        group.name = group.name or f"{message.name}_{index}"
        group.count = group.count or 1
        if group.kind == kinds.KIND_AUTO:
            group.kind = kinds.KIND_CPU if gpu is None else kinds.KIND_GPU
        if group.kind == kinds.KIND_GPU and not group.gpus and gpu is not None:
            group.gpus.append(gpu)


# ------------------------------------------------------------------------------------------------------------- printing


def to_json(message: ModelConfig) -> bytes:
    """Triton's JSON form: the proto's field names and order, enums as names, int64 as numbers, empty lists and maps present."""
    return msgspec.json.encode(to_dict(message))


def to_dict(message: ModelConfig) -> dict[str, Any]:
    """The JSON form as plain values."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            entry = field.message_type.fields_by_name["value"]
            values[field.name] = {str(key): _plain(entry, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            values[field.name] = [_plain(field, item) for item in value]
        # Absent sub-messages and unchosen members of a oneof are not printed; everything else is, default or not.
        elif not field.has_presence or message.HasField(field.name):
            values[field.name] = _plain(field, value)
    return values


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_dict(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value


def metadata(message: ModelConfig) -> bytes:
    """The model metadata answer without its "versions": JSON {name, platform, inputs, outputs}.

    Shapes are the client's: with the batch dimension as -1 where the model batches, and before any reshape.
    """
    batch = [-1] if message.max_batch_size > 0 else []

    def tensors(fields: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {
                "name": field.name,
                "datatype": from_model_config(data_type_name(field)),
                "shape": [*batch, *field.dims],
            }
            for field in fields
        ]

    return msgspec.json.encode(
        {
            "name": message.name,
            "platform": message.platform or message.backend,
            "inputs": tensors(message.input),
            "outputs": tensors(message.output),
        }
    )


def data_type_name(tensor: Any) -> str:
    """``TYPE_FP32`` of a ModelInput or ModelOutput; ``TYPE_INVALID`` where it is not said."""
    known = model_config_pb2().DataType.DESCRIPTOR.values_by_number.get(tensor.data_type)
    return str(known.name) if known is not None else f"TYPE_{tensor.data_type}"


# --------------------------------------------------------------------------------------------------------------- checks


def check(message: ModelConfig, *, whole: bool = False) -> None:
    """Everything that can be wrong between the fields.

    Args:
      whole: also what only a completed configuration must say: a known backend, and a datatype and dims for every tensor.
    Raises: InvalidArgument, Unsupported: the first finding, naming the model and the values.
    """
    name = message.name
    if message.platform == "ensemble" or message.HasField("ensemble_scheduling"):
        raise Unsupported(f"model '{name}': ensembles are not supported yet")
    if (message.backend or whole) and message.backend not in BACKENDS:
        raise InvalidArgument(
            f"model '{name}': backend '{message.backend}' is not supported; supported are {' and '.join(BACKENDS)}"
        )
    if message.max_batch_size < 0:
        raise InvalidArgument(f"model '{name}': max_batch_size is {message.max_batch_size}, it must not be negative")
    batches = message.max_batch_size > 0
    for kind, tensors in (("input", message.input), ("output", message.output)):
        for tensor in tensors:
            _check_tensor(f"model '{name}': {kind} '{tensor.name}'", tensor, batches, whole)
        _check_unique(f"model '{name}': {kind}", [tensor.name for tensor in tensors])
    for tensor in message.output:
        _check_file_name(f"model '{name}': label_filename of output '{tensor.name}'", tensor.label_filename)
    _check_file_name(f"model '{name}': default_model_filename", message.default_model_filename)
    _check_versions(message)
    _check_dynamic_batching(message)
    for group in message.instance_group:
        if group.count < 0:
            raise InvalidArgument(f"model '{name}': instance_group count is {group.count}, it must not be negative")
    count = sum(group.count for group in message.instance_group)
    if count > MAX_INSTANCES:
        raise InvalidArgument(
            f"model '{name}': instance_group asks for {count} instances, at most {MAX_INSTANCES} are made"
        )
    batch_buckets(message)


def _check_tensor(what: str, tensor: Any, batches: bool, whole: bool) -> None:
    if not tensor.name:
        raise InvalidArgument(f"{what}: 'name' is missing")
    if tensor.data_type or whole:
        # Also refuses numbers that name no type, which a binary message may carry.
        try:
            from_model_config(data_type_name(tensor))
        except InvalidArgument:
            raise InvalidArgument(f"{what}: 'data_type' is missing or unknown") from None
    if whole and not tensor.dims and not batches and not tensor.HasField("reshape"):
        raise InvalidArgument(f"{what}: 'dims' is missing")
    if len(tensor.dims) > MAX_RANK:
        raise InvalidArgument(f"{what}: {len(tensor.dims)} dims given, at most {MAX_RANK} are allowed")
    for dim in tensor.dims:
        if dim < 1 and dim != -1:
            raise InvalidArgument(f"{what}: dim {dim}; a dim is at least 1, or -1 where it varies")
    if tensor.HasField("reshape"):
        _check_reshape(what, list(tensor.dims), list(tensor.reshape.shape), batches)


def _check_reshape(what: str, dims: list[int], shape: list[int], batches: bool) -> None:
    if not shape and not batches:
        raise InvalidArgument(f"{what}: a model that does not batch cannot reshape to a scalar")
    if any(dim < 0 and dim != -1 for dim in shape):
        raise InvalidArgument(f"{what}: reshape {shape}; a dim is at least 0, or -1 where it varies")
    # Between the variable dims, in their order, the fixed parts must hold the same number of elements.
    if [math.prod(part) for part in _parts(dims)] != [math.prod(part) for part in _parts(shape)]:
        raise InvalidArgument(f"{what}: dims {dims} and reshape {shape} hold different numbers of elements")


def _parts(dims: list[int]) -> Iterator[list[int]]:
    part: list[int] = []
    for dim in dims:
        if dim == -1:
            yield part
            part = []
        else:
            part.append(dim)
    yield part


def _check_unique(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"{what} '{name}' is configured more than once")


def _check_file_name(what: str, name: str) -> None:
    if name in (".", "..") or "/" in name or "\0" in name:
        raise InvalidArgument(f"{what} must be a file name, without folders")


def _check_versions(message: ModelConfig) -> None:
    policy = message.version_policy
    chosen = policy.WhichOneof("policy_choice")
    if chosen == "latest" and policy.latest.num_versions < 1:
        raise InvalidArgument(f"model '{message.name}': version_policy latest needs num_versions of at least 1")
    if chosen == "specific" and not policy.specific.versions:
        raise InvalidArgument(f"model '{message.name}': version_policy specific names no version")
    for version in policy.specific.versions if chosen == "specific" else ():
        if version < 1:
            raise InvalidArgument(
                f"model '{message.name}': version_policy names version {version}; versions start at 1"
            )


def _check_dynamic_batching(message: ModelConfig) -> None:
    if not message.HasField("dynamic_batching"):
        return
    what, batching, limit = (
        f"model '{message.name}': dynamic_batching",
        message.dynamic_batching,
        message.max_batch_size,
    )
    for size in batching.preferred_batch_size:
        # A limit of 0 may still be filled in by the model itself; the worker checks again then.
        if size < 1 or (limit > 0 and size > limit):
            raise InvalidArgument(f"{what}: preferred_batch_size {size} is not between 1 and max_batch_size {limit}")
    levels = batching.priority_levels
    if batching.default_priority_level > levels or (levels and not batching.default_priority_level):
        raise InvalidArgument(
            f"{what}: default_priority_level {batching.default_priority_level} is not among {levels} levels"
        )
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            raise InvalidArgument(f"{what}: priority_queue_policy for level {level}, but there are {levels} levels")


def batch_buckets(message: ModelConfig) -> tuple[int, ...]:
    """Batch sizes to compile, from the parameter ``batch_buckets`` ("1,8,32"); empty where it is not given.

    Raises: InvalidArgument: not ascending whole numbers up to ``max_batch_size``.
    """
    if "batch_buckets" not in message.parameters:
        return ()
    text = message.parameters["batch_buckets"].string_value
    pieces = [piece.strip() for piece in text.split(",")]
    sizes = tuple(int(piece) for piece in pieces if piece.isascii() and piece.isdigit() and len(piece) < 10)
    limit = message.max_batch_size
    ascending = all(a < b for a, b in itertools.pairwise(sizes))
    if len(sizes) != len(pieces) or not ascending or sizes[0] < 1 or (limit > 0 and sizes[-1] > limit):
        raise InvalidArgument(
            f"model '{message.name}': parameter batch_buckets is '{text[:100]}'; expected ascending whole numbers "
            f"between 1 and max_batch_size {limit}, such as '1,8,32'"
        )
    return sizes
