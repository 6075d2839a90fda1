"""Reads, completes and prints a model's configuration. It is Triton's ModelConfig message, written as config.pbtxt or JSON."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from tensord.protocol import model_config_pb2
from tensord.shm.datatypes import from_model_config
from tensord.shm.errors import InvalidArgument

ModelConfig: TypeAlias = model_config_pb2.ModelConfig
ModelTensor: TypeAlias = model_config_pb2.ModelInput | model_config_pb2.ModelOutput

#: The most characters of one configuration.
MAX_BYTE_SIZE = 1 << 20
#: How long a sequence may be idle when its model does not say: Triton's default.
_SEQUENCE_IDLE_US = 1_000_000
#: Text that protobuf's reader, which Triton uses, takes besides JSON: strings in single quotes, keys without any, a comma behind
#: the last entry. Whatever begins a match is matched to its end, so that no text is looked at more than once.
_LOOSE = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.?)*+(?:"|\Z))|'(?P<single>(?:[^'\\]|\\.?)*+)(?:'|\Z)|"""
    r"""(?P<word>[A-Za-z_$][\w$]*+)(?P<colon>\s*+:)?|,(?=\s*+[}\]])""",
    re.DOTALL | re.ASCII,
)
_IN_SINGLE_QUOTES = re.compile(r"""\\.|\"""", re.DOTALL)


def empty(model_name: str = "") -> ModelConfig:
    """Returns a model configuration in which only the name is set."""
    return model_config_pb2.ModelConfig(name=model_name)


# -------------------------------------------------------------------------------------------------------------- reading


def parse_pbtxt(text: str, model_name: str) -> ModelConfig:
    """Parses a model's config.pbtxt. Raises InvalidArgument with line and column if the text is malformed."""
    config = empty()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        reason = str(error).removeprefix(f"{line}:{column} : ")
        where = f"line {line}, column {column}: " if line is not None else ""
        raise InvalidArgument(f"config.pbtxt of model '{model_name}': {where}{reason}") from None
    except UnicodeError:
        raise InvalidArgument(f"config.pbtxt of model '{model_name}': a string in it is not UTF-8") from None
    return config


def parse_json(text: str, model_name: str) -> ModelConfig:
    """Parses a model configuration in JSON. A single value may stand for a list that contains only this value.

    Raises InvalidArgument if the text is malformed.
    """
    # The import comes late: only processes that take overrides pay for it.
    from google.protobuf import json_format

    what = f"configuration of model '{model_name}'"
    if len(text) > MAX_BYTE_SIZE:
        raise InvalidArgument(f"{what}: {len(text)} characters given, at most {MAX_BYTE_SIZE} are read")
    config = empty()
    described: Any = config.DESCRIPTOR
    try:
        given = _decoded(text)
        # Protobuf takes lists for objects, objects for lists and so on, and fails in its own code.
        json_format.ParseDict(_shaped(what, given, described), config)
    except (json_format.ParseError, msgspec.DecodeError) as error:
        raise InvalidArgument(f"{what}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise InvalidArgument(f"{what}: nested too deeply") from None
    except UnicodeError:
        raise InvalidArgument(f"{what}: a string in it is not UTF-8") from None
    return config


def _decoded(text: str) -> Any:
    """Decodes JSON, or the looser JSON that protobuf accepts, such as with single quotes."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(_LOOSE.sub(_as_json, text))
        raise


def _as_json(found: re.Match[str]) -> str:
    string, single, word, colon = found.group("string", "single", "word", "colon")
    if single is not None:
        escaped = {"\\'": "'", '"': '\\"'}
        return '"' + _IN_SINGLE_QUOTES.sub(lambda one: escaped.get(one[0], one[0]), single) + '"'
    if word is not None:
        return word if colon is None else f'"{word}"{colon}'
    return string or ""


def _shaped(what: str, given: Any, described: Descriptor) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidArgument(f"{what}: {_kind(given)} is given, an object is expected")
    shaped: dict[str, Any] = {}
    for key, value in given.items():
        field = described.fields_by_name.get(key) or described.fields_by_camelcase_name.get(key)
        shaped[key] = value if field is None or value is None else _shaped_field(f"{what}: {key}", value, field)
    return shaped


def _shaped_field(what: str, value: Any, field: FieldDescriptor) -> Any:
    if is_map(field) and field.message_type is not None:
        if not isinstance(value, dict):
            raise InvalidArgument(f"{what}: {_kind(value)} is given, an object is expected")
        entry = field.message_type.fields_by_name["value"]
        return {name: _shaped_single(f"{what}: {name}", each, entry) for name, each in value.items()}
    if not field.is_repeated:
        return _shaped_single(what, value, field)
    # Triton reads one entry without its brackets as well.
    values = value if isinstance(value, list) else [value]
    return [_shaped_single(what, each, field) for each in values]


def _shaped_single(what: str, value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return _shaped(what, value, field.message_type)
    if isinstance(value, dict | list):
        raise InvalidArgument(f"{what}: {_kind(value)} is given, a single value is expected")
    return value


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )


def from_bytes(content: bytes) -> ModelConfig:
    """Parses a serialised ModelConfig. Raises InvalidArgument if ``content`` is malformed."""
    config = empty()
    try:
        config.ParseFromString(content)
    except DecodeError:
        raise InvalidArgument("malformed model configuration") from None
    return config


# ------------------------------------------------------------------------------------------------------------- defaults


def complete(config: ModelConfig, gpus: Sequence[int] = ()) -> None:
    """Sets Triton's defaults for all fields of ``config`` that are not set.

    The inputs, the outputs and ``max_batch_size`` must already be known. ``gpus`` are the numbers of the GPUs on which the
    model runs. The model runs on the CPU if ``gpus`` is empty.
    """
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if config.HasField("ensemble_scheduling"):
        config.platform = config.platform or "ensemble"
        config.model_transaction_policy.SetInParent()
        return
    if not config.default_model_filename:
        config.default_model_filename = "model.py"
    optimization = config.optimization
    for pinned in (optimization.input_pinned_memory, optimization.output_pinned_memory):
        if not pinned.enable:
            pinned.enable = True
    _complete_scheduling(config)
    _complete_instances(config, gpus)


def _complete_scheduling(config: ModelConfig) -> None:
    whole_batch = [config.max_batch_size] if config.max_batch_size > 0 else []
    if config.HasField("dynamic_batching"):
        if not config.dynamic_batching.preferred_batch_size:
            config.dynamic_batching.preferred_batch_size.extend(whole_batch)
    elif config.HasField("sequence_batching"):
        sequences = config.sequence_batching
        sequences.max_sequence_idle_microseconds = sequences.max_sequence_idle_microseconds or _SEQUENCE_IDLE_US
        if sequences.HasField("oldest") and not sequences.oldest.preferred_batch_size:
            sequences.oldest.preferred_batch_size.extend(whole_batch)


def _complete_instances(config: ModelConfig, gpus: Sequence[int]) -> None:
    kinds = model_config_pb2.ModelInstanceGroup
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        group.count = group.count or 1
        if group.kind == kinds.KIND_AUTO:
            group.kind = kinds.KIND_GPU if gpus else kinds.KIND_CPU
        if group.kind == kinds.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)


def with_gpus_of(config: bytes, others: Iterable[bytes]) -> bytes:
    """Returns the model configuration ``config`` with the GPUs in ``others`` added to its instance groups.

    ``config`` and ``others`` are workers' copies of one model's configuration, in JSON. Each worker's copy names
    only the GPUs of that worker. ``others`` may contain ``config``.
    """
    different = {each for each in others if each != config}
    if not different:
        return config
    joined = msgspec.json.decode(config)
    # While another version is being loaded, some workers may still have the one before, with other groups.
    for other in map(msgspec.json.decode, different):
        for group, theirs in zip(joined["instance_group"], other["instance_group"], strict=False):
            group["gpus"] = sorted({*group["gpus"], *theirs["gpus"]})
    return msgspec.json.encode(joined)


# ------------------------------------------------------------------------------------------------------------- printing


def tensors_of(config: ModelConfig) -> list[ModelTensor]:
    """Returns the inputs of a model configuration, followed by its outputs."""
    return [*config.input, *config.output]


def is_ordered(config: ModelConfig) -> bool:
    """Returns whether a model's answers must be sent in the order of the requests."""
    return bool(config.dynamic_batching.preserve_ordering or config.sequence_batching.oldest.preserve_ordering)


def to_json(config: ModelConfig) -> bytes:
    """Encodes a configuration as JSON in Triton's form.

    Fields are in the proto's order, enums are names, and int64 values are numbers.
    """
    return msgspec.json.encode(to_dict(config))


def to_dict(message: Any) -> dict[str, Any]:
    """Converts a protobuf message to a dict in the proto's order. Enums are names. Unset fields with presence are left out."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if is_map(field):
            entry = field.message_type.fields_by_name["value"]
            values[field.name] = {str(key): _plain(entry, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            values[field.name] = [_plain(field, item) for item in value]
        # Absent sub-messages and unchosen members of a oneof are not printed; everything else is, default or not.
        elif not field.has_presence or message.HasField(field.name):
            values[field.name] = _plain(field, value)
    return values


def is_map(field: FieldDescriptor) -> bool:
    """Returns whether a protobuf field is a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_dict(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value


def metadata(config: ModelConfig) -> bytes:
    """Returns the answer to a model metadata request as JSON, without the model's versions.

    The shape of each tensor is its ``dims`` in ``config``. If the model has a batch dimension, -1 comes before ``dims``.
    """
    batch = [-1] if config.max_batch_size > 0 else []

    def tensors(fields: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {"name": field.name, "datatype": from_model_config(data_type_name(field)), "shape": [*batch, *field.dims]}
            for field in fields
        ]

    return msgspec.json.encode(
        {
            "name": config.name,
            "platform": config.platform or config.backend,
            "inputs": tensors(config.input),
            "outputs": tensors(config.output),
        }
    )


def data_type_name(tensor: Any) -> str:
    """Returns the data type of a model's input or output, such as ``TYPE_FP32``. It is ``TYPE_INVALID`` if none is set."""
    known = model_config_pb2.DataType.DESCRIPTOR.values_by_number.get(tensor.data_type)
    return str(known.name) if known is not None else f"TYPE_{tensor.data_type}"


#: Values that a boolean model parameter may have.
_ANSWERS = {"true": True, "1": True, "false": False, "0": False}


def wants(config: ModelConfig, parameter: str) -> bool:
    """Returns a model's boolean parameter, or False if it is not given. Raises InvalidArgument if the value is no boolean."""
    if parameter not in config.parameters:
        return False
    said = config.parameters[parameter].string_value
    if said.lower() not in _ANSWERS:
        raise InvalidArgument(f"model '{config.name}': parameter {parameter} is {said[:100]!r}; expected true or false")
    return _ANSWERS[said.lower()]
