"""Checks the fields of a model's configuration, one by one and together, before any process uses the configuration."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tensord.config import ensemble_checks, model_fields
from tensord.config.model_config import ModelConfig, data_type_name, wants
from tensord.protocol import model_config_pb2
from tensord.shm.datatypes import MAX_RANK, from_model_config
from tensord.shm.errors import InvalidArgument, Unsupported

#: The back ends that this server runs.
BACKENDS = ("jax", "python")
#: The most instances of a model: each is a thread of the worker.
MAX_INSTANCES = 256
#: The prefix of parameters that list sizes of a named axis.
_AXIS = "buckets."
_MAX_SIZE = 1 << 31
#: The parameter of a Triton Python model that may answer only as its configuration says.
STRICT_OUTPUTS = "strict_outputs"
#: The parameter of a Triton Python model whose instances may be initialised at the same time, and finalized so.
PARALLEL_INITIALIZE = "parallel_initialize"
#: The parameter of a model whose waiting requests without a replace key replace one another.
REPLACE_WAITING = "replace_waiting"
#: The parameter of a model whose function combines the rows of a batch: no requests share one, and none is padded with rows.
ROWS_MAY_MIX = "rows_may_mix"
#: The parameters that give a model workers which serve no other, and each of these a fraction of its GPU's memory.
ISOLATED = "isolated"
ISOLATED_FRACTION = "isolated_memory_fraction"
#: Models with the same value of this parameter are on one worker.
TOGETHER = "tensord_together"


def check(config: ModelConfig, *, whole: bool = False, scalars: Collection[str] = ()) -> None:
    """Checks all fields of a model's configuration.

    If ``whole`` is true, the configuration is complete: the backend must be known, and every tensor must have a datatype and
    dims. ``scalars`` are the names of tensors that the model itself declares without dims. Such tensors need no dims here.

    Raises InvalidArgument if a field is wrong, or Unsupported if this server does not offer what a field asks for. The
    message names the model and its first mistake.
    """
    name = config.name
    _check_cache(config)
    model_fields.refuse(config)
    ensemble = ensemble_checks.is_ensemble(config)
    if ensemble:
        ensemble_checks.check(config)
    elif config.platform and not config.backend:
        raise Unsupported(
            f"model '{name}': platform '{config.platform}' is not supported; name a backend: {' or '.join(BACKENDS)}"
        )
    if not ensemble and (config.backend or whole) and config.backend not in BACKENDS:
        raise InvalidArgument(
            f"model '{name}': backend '{config.backend}' is not supported; supported are {' and '.join(BACKENDS)}"
        )
    if config.max_batch_size < 0:
        raise InvalidArgument(f"model '{name}': max_batch_size is {config.max_batch_size}, it must not be negative")
    batches = config.max_batch_size > 0
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            _check_tensor(f"model '{name}': {kind} '{tensor.name}'", tensor, batches, whole, tensor.name in scalars)
        _check_unique(f"model '{name}': {kind}", [tensor.name for tensor in tensors])
    for tensor in config.output:
        _check_file_name(f"model '{name}': label_filename of output '{tensor.name}'", tensor.label_filename)
    _check_file_name(f"model '{name}': default_model_filename", config.default_model_filename)
    _check_versions(config)
    _check_dynamic_batching(config)
    if config.HasField("sequence_batching"):
        _check_sequences(config)
        _check_states(config, whole)
    _check_ragged(config, whole)
    _check_instances(config)
    batch_buckets(config)
    axis_buckets(config)
    for parameter in (STRICT_OUTPUTS, PARALLEL_INITIALIZE):
        wants(config, parameter)
    if wants(config, REPLACE_WAITING) and config.HasField("sequence_batching"):
        raise InvalidArgument(
            f"model '{name}': parameter {REPLACE_WAITING} is true, and the requests of a sequence cannot replace one another"
        )
    shares = config.HasField("sequence_batching") or any(tensor.allow_ragged_batch for tensor in config.input)
    if wants(config, ROWS_MAY_MIX) and shares:
        raise InvalidArgument(f"model '{name}': {ROWS_MAY_MIX}: requests of sequences and ragged inputs share batches")
    _check_isolation(config)


def _check_tensor(what: str, tensor: Any, batches: bool, whole: bool, scalar: bool) -> None:
    if not tensor.name:
        raise InvalidArgument(f"{what}: 'name' is missing")
    _check_form(what, tensor, whole)
    if whole and not (tensor.dims or batches or scalar or tensor.HasField("reshape")):
        raise InvalidArgument(
            f"{what}: 'dims' is missing; without max_batch_size a single number has dims [1], or model.py says so, as in 'FP32[]'"
        )
    _check_rank(what, tensor.reshape.shape)
    if getattr(tensor, "format", 0) and len(tensor.dims) != 3 and (tensor.dims or whole):
        raise InvalidArgument(f"{what}: model input NHWC/NCHW require 3 dims, {len(tensor.dims)} given")
    if tensor.HasField("reshape"):
        _check_reshape(what, list(tensor.dims), list(tensor.reshape.shape), batches)


def _check_form(what: str, tensor: Any, whole: bool) -> None:
    if tensor.data_type or whole:
        # Also refuses numbers that name no type, which a binary message may carry.
        try:
            from_model_config(data_type_name(tensor))
        except InvalidArgument:
            raise InvalidArgument(f"{what}: 'data_type' is missing or unknown") from None
    _check_rank(what, tensor.dims)
    for dim in tensor.dims:
        if dim < 1 and dim != -1:
            raise InvalidArgument(f"{what}: dim {dim}; a dim is at least 1, or -1 where it varies")


def _check_rank(what: str, dims: Sequence[int]) -> None:
    if len(dims) > MAX_RANK:
        raise InvalidArgument(f"{what}: {len(dims)} dims given, at most {MAX_RANK} are allowed")


def _check_reshape(what: str, dims: list[int], shape: list[int], batches: bool) -> None:
    if not shape and not batches:
        raise InvalidArgument(f"{what}: a model that does not batch cannot reshape to a scalar")
    if any(dim < 0 and dim != -1 for dim in shape):
        raise InvalidArgument(f"{what}: reshape {shape}; a dim is at least 0, or -1 where it varies")
    # The fixed dims between variable ones, in their order, must hold the same number of elements.
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


def _check_versions(config: ModelConfig) -> None:
    policy = config.version_policy
    chosen = policy.WhichOneof("policy_choice")
    if chosen == "latest" and policy.latest.num_versions < 1:
        raise InvalidArgument(f"model '{config.name}': version_policy latest needs num_versions of at least 1")
    if chosen == "specific" and not policy.specific.versions:
        raise InvalidArgument(f"model '{config.name}': version_policy specific names no version")
    for version in policy.specific.versions if chosen == "specific" else ():
        if version < 1:
            raise InvalidArgument(f"model '{config.name}': version_policy names version {version}; versions start at 1")


def _check_instances(config: ModelConfig) -> None:
    kinds = model_config_pb2.ModelInstanceGroup
    needed = [resource for group in config.instance_group for resource in group.rate_limiter.resources]
    shared = {resource.name.lower(): getattr(resource, "global") for resource in needed}
    for resource in needed:
        if shared[resource.name.lower()] != getattr(resource, "global"):
            raise InvalidArgument(
                f'Resource "{resource.name}" is present as both global and device-specific resource in the model configuration.'
            )
    for index, group in enumerate(config.instance_group):
        if group.count < 0:
            raise InvalidArgument(
                f"model '{config.name}': instance_group count is {group.count}, it must not be negative"
            )
        if group.kind not in kinds.Kind.values():
            raise InvalidArgument(f"model '{config.name}': instance_group has kind {group.kind}, which is none")
        if group.gpus and group.kind in (kinds.KIND_CPU, kinds.KIND_MODEL):
            kind = kinds.Kind.Name(group.kind)
            raise InvalidArgument(
                f"instance group {group.name or f'{config.name}_{index}'} of model {config.name} has kind {kind} but specifies "
                "one or more GPUs"
            )
    # A group without a count is one instance.
    count = sum(max(1, group.count) for group in config.instance_group)
    if count > MAX_INSTANCES:
        raise InvalidArgument(
            f"model '{config.name}': instance_group asks for {count} instances, at most {MAX_INSTANCES} are made"
        )


def check_device(config: ModelConfig, gpu: int | None) -> None:
    """Raises InvalidArgument if a model runs only on GPUs and the worker has none. ``gpu`` is the worker's GPU, or None."""
    kinds = model_config_pb2.ModelInstanceGroup
    for group in config.instance_group:
        if gpu is None and all(each.kind == kinds.KIND_GPU for each in config.instance_group):
            raise InvalidArgument(
                f"instance group {group.name} of model {config.name} has kind KIND_GPU but no GPUs are available"
            )


def _check_dynamic_batching(config: ModelConfig) -> None:
    if not config.HasField("dynamic_batching"):
        return
    # The errors have Triton's words, and the number that was given.
    name, batching, limit = config.name, config.dynamic_batching, config.max_batch_size
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
        _check_order(config)


def _check_cache(config: ModelConfig) -> None:
    if not config.response_cache.enable:
        return
    if config.HasField("sequence_batching"):
        asked = "sequence batching scheduler"
    elif config.model_transaction_policy.decoupled:
        asked = "'decoupled' transaction policy"
    else:
        return
    raise InvalidArgument(
        f"Response Cache does not currently support model {config.name} with {asked}. Please disable the response cache."
    )


def _check_order(config: ModelConfig) -> None:
    batching = config.dynamic_batching
    if batching.priority_levels > 1:
        raise InvalidArgument(f"Only one priority level is allowed when 'preserve_ordering' is true for {config.name}")
    for policy in (batching.default_queue_policy, *batching.priority_queue_policy.values()):
        if policy.default_timeout_microseconds and policy.timeout_action == type(policy).DELAY:
            raise InvalidArgument(
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {config.name}"
            )


def batch_buckets(config: ModelConfig) -> tuple[int, ...]:
    """Returns the batch sizes for which a model is compiled. The parameter ``batch_buckets`` lists them, such as "1,8,32".

    The result is empty if the parameter is not given. Raises InvalidArgument if the parameter is malformed.
    """
    if "batch_buckets" not in config.parameters:
        return ()
    return _sizes(config, "batch_buckets", config.max_batch_size, f"max_batch_size {config.max_batch_size}")


def axis_buckets(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the sizes for which a model is compiled, by the names of the axes of tensors.

    The parameter ``buckets.NAME`` of ``config``, such as "32,128", lists the sizes of the axis NAME. If it is "auto", which
    means powers of two, the tuple is empty. Raises InvalidArgument if a parameter is malformed.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(name for name in config.parameters if name.startswith(_AXIS)):
        automatic = config.parameters[name].string_value == "auto"
        found[name.removeprefix(_AXIS)] = () if automatic else _sizes(config, name, _MAX_SIZE, str(_MAX_SIZE))
    return found


def _sizes(config: ModelConfig, parameter: str, limit: int, most: str) -> tuple[int, ...]:
    text = config.parameters[parameter].string_value
    pieces = [piece.strip() for piece in text.split(",")]
    sizes = tuple(int(piece) for piece in pieces if piece.isascii() and piece.isdigit() and len(piece) < 11)
    ascending = all(a < b for a, b in itertools.pairwise(sizes))
    if len(sizes) != len(pieces) or not ascending or sizes[0] < 1 or (limit > 0 and sizes[-1] > limit):
        raise InvalidArgument(
            f"model '{config.name}': parameter {parameter} is '{text[:100]}'; expected ascending whole numbers "
            f"between 1 and {most}, such as '1,8,32'"
        )
    return sizes


_RAGGED_DATATYPES = ("TYPE_INT32", "TYPE_FP32")


def _check_ragged(config: ModelConfig, whole: bool) -> None:
    name = config.name
    inputs = {tensor.name for tensor in config.input} if config.input or whole else None
    outputs = {tensor.name for tensor in config.output} if config.output or whole else None
    for tensor in config.batch_input:
        _check_source("batch input", name, tensor, inputs)
        if data_type_name(tensor) not in _RAGGED_DATATYPES:
            raise InvalidArgument(f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {name}")
    targets: set[str] = set()
    for cut in config.batch_output:
        _check_source("batch output", name, cut, inputs)
        for target in cut.target_name:
            if outputs is not None and target not in outputs:
                raise InvalidArgument(f"unknown target output name '{target}' for {name}")
            if target in targets:
                raise InvalidArgument(f"target output name '{target}' can only be specified once for {name}")
            targets.add(target)


def _check_source(what: str, model: str, tensor: Any, inputs: set[str] | None) -> None:
    kinds = tensor.DESCRIPTOR.fields_by_name["kind"].enum_type.values_by_number
    if tensor.kind not in kinds:
        raise InvalidArgument(f"{what} has kind {tensor.kind}, which is none, for {model}")
    if len(tensor.source_input) != 1:
        raise InvalidArgument(
            f"{what} kind '{kinds[tensor.kind].name}' expects 1 source input, got {len(tensor.source_input)} for {model}"
        )
    for source in tensor.source_input:
        if inputs is not None and source not in inputs:
            raise InvalidArgument(f"unknown source input name '{source}' for {model}")
    if not tensor.target_name:
        raise InvalidArgument(f"{what} kind '{kinds[tensor.kind].name}' has no target_name for {model}")


_CONTROL_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def _check_sequences(config: ModelConfig) -> None:
    name, sequences = config.name, config.sequence_batching
    _check_controls(config)
    limit = config.max_batch_size
    for size in sequences.oldest.preferred_batch_size:
        if size < 1:
            raise InvalidArgument(f"sequence batching preferred batch size must be positive for {name}")
        # A limit of 0 may still be filled in by the model itself; the worker checks again then.
        if 0 < limit < size:
            raise InvalidArgument(f"sequence batching preferred batch size must be <= max batch size for {name}")
    if sequences.oldest.max_candidate_sequences < 0:
        raise InvalidArgument(
            f"sequence batching max_candidate_sequences is {sequences.oldest.max_candidate_sequences}, "
            f"it must not be negative for {name}"
        )
    if not 0 <= sequences.direct.minimum_slot_utilization <= 1:
        raise InvalidArgument(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}")


def _check_controls(config: ModelConfig) -> None:
    name = config.name
    kinds = model_config_pb2.ModelSequenceBatching.Control.Kind
    seen: dict[int, str] = {}
    inputs = {tensor.name for tensor in config.input}
    tensors: set[str] = set()
    for tensor in config.sequence_batching.control_input:
        if not tensor.name:
            raise InvalidArgument(f"sequence batching control tensor must have a name for {name}")
        if len(tensor.control) > 1 or tensor.name in tensors:
            raise InvalidArgument(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for {name}"
            )
        tensors.add(tensor.name)
        if tensor.name in inputs:
            raise InvalidArgument(f"sequence batching control tensor '{tensor.name}' is an input as well for {name}")
        for control in tensor.control:
            kind = kinds.Name(control.kind) if control.kind in kinds.values() else str(control.kind)
            if control.kind in seen:
                raise InvalidArgument(f"sequence batching specifies multiple {kind} tensors for {name}")
            seen[control.kind] = tensor.name
            _check_values(name, kind, control)


def _check_values(name: str, kind: str, control: Any) -> None:
    given = [field for field in _CONTROL_VALUES if len(getattr(control, field))]
    if kind == "CONTROL_SEQUENCE_CORRID":
        if given:
            raise InvalidArgument(
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
                f"for {kind} for {name}"
            )
        types = model_config_pb2.DataType
        if control.data_type not in [types.Value(each) for each in _CORRID_TYPES]:
            raise InvalidArgument(
                f"unexpected data type for control {kind} for {name}. Allowed data types are TYPE_UINT64, TYPE_INT64, "
                "TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    if not given:
        raise InvalidArgument(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            f"for {kind} for {name}"
        )
    if len(given) > 1:
        raise InvalidArgument(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' "
            f"for {kind} for {name}"
        )
    if len(getattr(control, given[0])) != 2:
        raise InvalidArgument(
            f"sequence batching control '{given[0]}' must have exactly 2 entries for {kind} for {name}"
        )


def _check_states(config: ModelConfig, whole: bool) -> None:
    states = config.sequence_batching.state
    if states and config.backend == "python":
        raise Unsupported(f"model '{config.name}': sequence_batching.state: a Triton Python model keeps its own state")
    seen: dict[str, set[str]] = {"input": set(), "output": set()}
    for state in states:
        what = f"model '{config.name}': state '{state.input_name}'"
        for kind, name in (("input", state.input_name), ("output", state.output_name)):
            if not name:
                raise InvalidArgument(f"{what}: '{kind}_name' is missing")
            if name in seen[kind]:
                raise InvalidArgument(f"State {kind} name '{name}' specified more than once.")
            seen[kind].add(name)
        _check_form(what, state, whole)
        _check_initial(state)
        if state.use_growable_memory and not state.use_same_buffer_for_input_output:
            raise InvalidArgument(
                "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name "
                f"'{state.input_name}'."
            )


def _check_initial(state: Any) -> None:
    name = state.input_name
    if len(state.initial_state) > 1:
        raise InvalidArgument(
            f"initial_state field for state input '{name}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements."
        )
    for initial in state.initial_state:
        if not initial.name:
            raise InvalidArgument(f"Field 'name' must be set when using initial_state for state input '{name}'.")
        if initial.data_type != state.data_type:
            raise InvalidArgument(
                f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
            )
        if len(initial.dims) != len(state.dims):
            raise InvalidArgument(
                "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
                f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
            )
        for given, declared in zip(initial.dims, state.dims, strict=True):
            if given < 1:
                raise InvalidArgument(
                    f"'initial_state' field for state input name '{name}' contains variable dimensions."
                )
            if declared not in (-1, given):
                raise InvalidArgument(
                    f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                    f"{given} != {declared}"
                )
        if initial.WhichOneof("state_data") is None:
            raise InvalidArgument(f"initial_state of state input '{name}' has neither zero_data nor data_file")


def is_isolated(config: ModelConfig) -> bool:
    """Returns the parameter ``isolated`` of a model's configuration, or False if it is not set.

    The workers of an isolated model run no other model. Raises InvalidArgument if the parameter's value is no boolean.
    """
    return wants(config, ISOLATED)


def isolated_fraction(config: ModelConfig, default: float) -> float:
    """Returns the fraction of a GPU's memory for a worker that runs only the model of ``config``, a number from 0 to 1.

    The model's parameter ``isolated_memory_fraction`` gives the fraction. Without this parameter, the result is ``default``.
    Raises InvalidArgument if the parameter is no number above 0 and up to 1.
    """
    if ISOLATED_FRACTION not in config.parameters:
        return default
    said = config.parameters[ISOLATED_FRACTION].string_value
    try:
        fraction = float(said)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise InvalidArgument(
            f"model '{config.name}': parameter {ISOLATED_FRACTION} is {said[:100]!r}; expected a number above 0, up to 1"
        )
    return fraction


def _check_isolation(config: ModelConfig) -> None:
    isolated_fraction(config, 1.0)
    if not is_isolated(config):
        return
    if ensemble_checks.is_ensemble(config):
        raise InvalidArgument(
            f"ensemble '{config.name}' cannot be {ISOLATED}: it has no code of its own, and runs in the worker of its models"
        )
    if TOGETHER in config.parameters:
        raise InvalidArgument(
            f"model '{config.name}' is to have a worker to itself ({ISOLATED}), and to share one with the models of "
            f"'{config.parameters[TOGETHER].string_value}' ({TOGETHER})"
        )
