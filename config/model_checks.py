"""What can be wrong in a model's configuration, and between its fields.

Its one rule: whatever an operator or a client wrote is refused here, with the model and the place named, before any process acts
on it. ``tensord.config.model_fields`` says which fields are refused altogether.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from tensord.config import ensemble_checks, isolation, model_fields, ragged_checks, sequence_checks, state_checks
from tensord.config.model_config import ModelConfig, data_type_name, wants
from tensord.protocol import model_config_pb2
from tensord.shm.datatypes import MAX_RANK, from_model_config
from tensord.shm.errors import InvalidArgument, Unsupported

#: Back ends this server runs.
BACKENDS = ("jax", "python")
#: Each is a thread of the worker.
MAX_INSTANCES = 256
#: How parameters begin that list sizes of a named axis.
_AXIS = "buckets."
_MAX_SIZE = 1 << 31
#: The parameter of a Triton Python model that may answer only as its configuration says.
STRICT_OUTPUTS = "strict_outputs"


def check(message: ModelConfig, *, whole: bool = False, scalars: Collection[str] = ()) -> None:
    """Everything that can be wrong between the fields.

    Args:
      whole: also what only a completed configuration must say: a known backend, and a datatype and dims for every tensor.
      scalars: tensors of which the model itself declares that they have no dims, which a configuration alone cannot say.
    Raises: InvalidArgument, Unsupported: the first finding, naming the model and the values.
    """
    name = message.name
    _check_cache(message)
    model_fields.refuse(message)
    ensemble = ensemble_checks.is_ensemble(message)
    if ensemble:
        ensemble_checks.check(message)
    elif message.platform and not message.backend:
        raise Unsupported(
            f"model '{name}': platform '{message.platform}' is not supported; name a backend: {' or '.join(BACKENDS)}"
        )
    if not ensemble and (message.backend or whole) and message.backend not in BACKENDS:
        raise InvalidArgument(
            f"model '{name}': backend '{message.backend}' is not supported; supported are {' and '.join(BACKENDS)}"
        )
    if message.max_batch_size < 0:
        raise InvalidArgument(f"model '{name}': max_batch_size is {message.max_batch_size}, it must not be negative")
    batches = message.max_batch_size > 0
    for kind, tensors in (("input", message.input), ("output", message.output)):
        for tensor in tensors:
            _check_tensor(f"model '{name}': {kind} '{tensor.name}'", tensor, batches, whole, tensor.name in scalars)
        _check_unique(f"model '{name}': {kind}", [tensor.name for tensor in tensors])
    for tensor in message.output:
        _check_file_name(f"model '{name}': label_filename of output '{tensor.name}'", tensor.label_filename)
    _check_file_name(f"model '{name}': default_model_filename", message.default_model_filename)
    _check_versions(message)
    _check_dynamic_batching(message)
    if message.HasField("sequence_batching"):
        sequence_checks.check(message)
        state_checks.check(message, whole)
    ragged_checks.check(message, whole)
    _check_instances(message)
    batch_buckets(message)
    axis_buckets(message)
    wants(message, STRICT_OUTPUTS)
    isolation.check(message)


def _check_tensor(what: str, tensor: Any, batches: bool, whole: bool, scalar: bool) -> None:
    if not tensor.name:
        raise InvalidArgument(f"{what}: 'name' is missing")
    if tensor.data_type or whole:
        # Also refuses numbers that name no type, which a binary message may carry.
        try:
            from_model_config(data_type_name(tensor))
        except InvalidArgument:
            raise InvalidArgument(f"{what}: 'data_type' is missing or unknown") from None
    if whole and not (tensor.dims or batches or scalar or tensor.HasField("reshape")):
        raise InvalidArgument(
            f"{what}: 'dims' is missing; without max_batch_size a single number has dims [1], or model.py says so, as in 'FP32[]'"
        )
    for dims in (tensor.dims, tensor.reshape.shape):
        if len(dims) > MAX_RANK:
            raise InvalidArgument(f"{what}: {len(dims)} dims given, at most {MAX_RANK} are allowed")
    for dim in tensor.dims:
        if dim < 1 and dim != -1:
            raise InvalidArgument(f"{what}: dim {dim}; a dim is at least 1, or -1 where it varies")
    if getattr(tensor, "format", 0) and len(tensor.dims) != 3 and (tensor.dims or whole):
        raise InvalidArgument(f"{what}: model input NHWC/NCHW require 3 dims, {len(tensor.dims)} given")
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
    for name, count in Counter(names).items():
        if count > 1:
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


def _check_instances(message: ModelConfig) -> None:
    kinds = model_config_pb2.ModelInstanceGroup
    for index, group in enumerate(message.instance_group):
        if group.count < 0:
            raise InvalidArgument(
                f"model '{message.name}': instance_group count is {group.count}, it must not be negative"
            )
        if group.kind not in kinds.Kind.values():
            raise InvalidArgument(f"model '{message.name}': instance_group has kind {group.kind}, which is none")
        shared = {resource.name.lower(): getattr(resource, "global") for resource in group.rate_limiter.resources}
        for resource in group.rate_limiter.resources:
            if shared[resource.name.lower()] != getattr(resource, "global"):
                raise InvalidArgument(
                    f'Resource "{resource.name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
        if group.gpus and group.kind in (kinds.KIND_CPU, kinds.KIND_MODEL):
            kind = kinds.Kind.Name(group.kind)
            raise InvalidArgument(
                f"instance group {group.name or f'{message.name}_{index}'} of model {message.name} has kind {kind} but specifies "
                "one or more GPUs"
            )
    # A group without a count is one instance.
    count = sum(max(1, group.count) for group in message.instance_group)
    if count > MAX_INSTANCES:
        raise InvalidArgument(
            f"model '{message.name}': instance_group asks for {count} instances, at most {MAX_INSTANCES} are made"
        )


def check_device(message: ModelConfig, gpu: int | None) -> None:
    """Raises InvalidArgument: a completed configuration asks for GPUs only, and ``gpu``, where it is loaded, is None, the CPU."""
    kinds = model_config_pb2.ModelInstanceGroup
    for group in message.instance_group:
        if gpu is None and all(each.kind == kinds.KIND_GPU for each in message.instance_group):
            raise InvalidArgument(
                f"instance group {group.name} of model {message.name} has kind KIND_GPU but no GPUs are available"
            )


def _check_dynamic_batching(message: ModelConfig) -> None:
    if not message.HasField("dynamic_batching"):
        return
    # In Triton's words, and with the number that was given.
    name, batching, limit = message.name, message.dynamic_batching, message.max_batch_size
    for size in batching.preferred_batch_size:
        if size < 1:
            raise InvalidArgument(f"dynamic batching preferred size must be positive for {name}: {size} is given")
        # A limit of 0 may still be filled in by the model itself; the worker checks again then.
        if 0 < limit < size:
            raise InvalidArgument(
                f"dynamic batching preferred size must be <= max batch size for {name}: {size} is given, of at most {limit}"
            )
    levels, default = batching.priority_levels, batching.default_priority_level
    if default > levels or (levels and not default):
        raise InvalidArgument(f"default priority level must be in range [1, {levels}] for {name}: {default} is given")
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            raise InvalidArgument(
                f"priority queue policy must have priority level in range [1, {levels}] for {name}: {level} is given"
            )
    if batching.preserve_ordering:
        _check_order(message)


def _check_cache(message: ModelConfig) -> None:
    """What cannot be answered again, in Triton's words."""
    if not message.response_cache.enable:
        return
    if message.HasField("sequence_batching"):
        asked = "sequence batching scheduler"
    elif message.model_transaction_policy.decoupled:
        asked = "'decoupled' transaction policy"
    else:
        return
    raise InvalidArgument(
        f"Response Cache does not currently support model {message.name} with {asked}. Please disable the response cache."
    )


def _check_order(message: ModelConfig) -> None:
    """What would contradict ``preserve_ordering``, in Triton's words."""
    batching = message.dynamic_batching
    if batching.priority_levels > 1:
        raise InvalidArgument(f"Only one priority level is allowed when 'preserve_ordering' is true for {message.name}")
    for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values()):
        if policy.default_timeout_microseconds and policy.timeout_action == type(policy).DELAY:
            raise InvalidArgument(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {message.name}"
            )


def batch_buckets(message: ModelConfig) -> tuple[int, ...]:
    """Batch sizes to compile, from the parameter ``batch_buckets`` ("1,8,32"); empty where it is not given.

    Raises: InvalidArgument: not ascending whole numbers up to ``max_batch_size``.
    """
    if "batch_buckets" not in message.parameters:
        return ()
    return _sizes(message, "batch_buckets", message.max_batch_size, f"max_batch_size {message.max_batch_size}")


def axis_buckets(message: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Sizes of named axes to compile, from parameters such as ``buckets.sequence`` ("32,128,256"); none: "auto".

    Raises: InvalidArgument: neither that nor ascending whole numbers.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(name for name in message.parameters if name.startswith(_AXIS)):
        automatic = message.parameters[name].string_value == "auto"
        found[name.removeprefix(_AXIS)] = () if automatic else _sizes(message, name, _MAX_SIZE, str(_MAX_SIZE))
    return found


def _sizes(message: ModelConfig, parameter: str, limit: int, most: str) -> tuple[int, ...]:
    text = message.parameters[parameter].string_value
    pieces = [piece.strip() for piece in text.split(",")]
    sizes = tuple(int(piece) for piece in pieces if piece.isascii() and piece.isdigit() and len(piece) < 11)
    ascending = all(a < b for a, b in itertools.pairwise(sizes))
    if len(sizes) != len(pieces) or not ascending or sizes[0] < 1 or (limit > 0 and sizes[-1] > limit):
        raise InvalidArgument(
            f"model '{message.name}': parameter {parameter} is '{text[:100]}'; expected ascending whole numbers "
            f"between 1 and {most}, such as '1,8,32'"
        )
    return sizes
