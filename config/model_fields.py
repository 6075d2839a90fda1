"""Sorts the fields of ModelConfig into three kinds: used, refused when the model is loaded, and ignored with a warning.

Every field of the published message is in exactly one of the three tables here, by its path, or is below a field that is
refused or ignored as a whole. A test fails if a newer message has a field that is in none. The tables of docs/models.md
are these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tensord.config.model_config import ModelConfig, is_map
from tensord.shm.errors import Unsupported

#: Paths of honoured fields without sub-fields. Wrong values are refused by ``tensord.config.model_checks``, or by the worker
#: that loads the model.
HONOURED = frozenset(
    {
        "name",
        "platform",
        "backend",
        "version_policy.latest.num_versions",
        "version_policy.all",
        "version_policy.specific.versions",
        "max_batch_size",
        "input.name",
        "input.data_type",
        "input.format",
        "input.dims",
        "input.reshape.shape",
        "input.optional",
        "input.allow_ragged_batch",
        "batch_input.kind",
        "batch_input.target_name",
        "batch_input.data_type",
        "batch_input.source_input",
        "batch_output.kind",
        "batch_output.target_name",
        "batch_output.source_input",
        "output.name",
        "output.data_type",
        "output.dims",
        "output.reshape.shape",
        "output.label_filename",
        "dynamic_batching.preferred_batch_size",
        "dynamic_batching.max_queue_delay_microseconds",
        "dynamic_batching.priority_levels",
        "dynamic_batching.default_priority_level",
        "dynamic_batching.preserve_ordering",
        "dynamic_batching.default_queue_policy.timeout_action",
        "dynamic_batching.default_queue_policy.default_timeout_microseconds",
        "dynamic_batching.default_queue_policy.allow_timeout_override",
        "dynamic_batching.default_queue_policy.max_queue_size",
        "dynamic_batching.priority_queue_policy.key",
        "dynamic_batching.priority_queue_policy.value.timeout_action",
        "dynamic_batching.priority_queue_policy.value.default_timeout_microseconds",
        "dynamic_batching.priority_queue_policy.value.allow_timeout_override",
        "dynamic_batching.priority_queue_policy.value.max_queue_size",
        "response_cache.enable",
        "model_transaction_policy.decoupled",
        "ensemble_scheduling.step.model_name",
        "ensemble_scheduling.step.model_version",
        "ensemble_scheduling.step.input_map.key",
        "ensemble_scheduling.step.input_map.value",
        "ensemble_scheduling.step.output_map.key",
        "ensemble_scheduling.step.output_map.value",
        "ensemble_scheduling.max_inflight_requests",
        "sequence_batching.max_sequence_idle_microseconds",
        "sequence_batching.control_input.name",
        "sequence_batching.control_input.control.kind",
        "sequence_batching.control_input.control.int32_false_true",
        "sequence_batching.control_input.control.fp32_false_true",
        "sequence_batching.control_input.control.bool_false_true",
        "sequence_batching.control_input.control.data_type",
        "sequence_batching.direct.max_queue_delay_microseconds",
        "sequence_batching.direct.minimum_slot_utilization",
        "sequence_batching.oldest.max_candidate_sequences",
        "sequence_batching.oldest.preferred_batch_size",
        "sequence_batching.oldest.max_queue_delay_microseconds",
        "sequence_batching.oldest.preserve_ordering",
        "sequence_batching.iterative_sequence",
        "sequence_batching.state.input_name",
        "sequence_batching.state.output_name",
        "sequence_batching.state.data_type",
        "sequence_batching.state.dims",
        "sequence_batching.state.initial_state.name",
        "sequence_batching.state.initial_state.data_type",
        "sequence_batching.state.initial_state.dims",
        "sequence_batching.state.initial_state.zero_data",
        "sequence_batching.state.initial_state.data_file",
        "instance_group.name",
        "instance_group.kind",
        "instance_group.count",
        "instance_group.gpus",
        "instance_group.passive",
        "instance_group.rate_limiter.priority",
        "instance_group.rate_limiter.resources.count",
        "instance_group.rate_limiter.resources.global",
        "instance_group.rate_limiter.resources.name",
        "default_model_filename",
        "parameters.key",
        "parameters.value.string_value",
        "model_warmup.name",
        "model_warmup.batch_size",
        "model_warmup.inputs.key",
        "model_warmup.inputs.value.data_type",
        "model_warmup.inputs.value.dims",
        "model_warmup.inputs.value.zero_data",
        "model_warmup.inputs.value.random_data",
        "model_warmup.inputs.value.input_data_file",
        "model_warmup.count",
    }
)

_SHAPE_TENSOR = "shape tensors are only supported for TensorRT platform"
_NON_LINEAR = "non-linear formats are only supported for TensorRT platform"
#: Fields that a model cannot be served with: path -> why it is refused.
REFUSED = {
    "input.is_shape_tensor": _SHAPE_TENSOR,
    "output.is_shape_tensor": _SHAPE_TENSOR,
    "input.is_non_linear_format_io": _NON_LINEAR,
    "output.is_non_linear_format_io": _NON_LINEAR,
    "model_repository_agents.agents": "no repository agents are run, and what one should check is not left out in silence",
}

_PINNED = "page-locked memory is used wherever there is some (workers.pinned_byte_size)"
#: Fields that are ignored: path -> what happens instead.
WITHOUT_EFFECT = {
    "runtime": "the back end is part of the worker",
    "optimization.graph": "XLA optimizes as it does by itself",
    "optimization.priority": "all models of a worker have the same priority",
    "optimization.cuda": "XLA decides about CUDA graphs and streams",
    "optimization.execution_accelerators": "XLA compiles the model",
    "optimization.input_pinned_memory.enable": _PINNED,
    "optimization.output_pinned_memory.enable": _PINNED,
    "optimization.gather_kernel_buffer_threshold": "inputs are gathered as the device does it best",
    "optimization.eager_batching": "a batch is gathered when it runs",
    "ensemble_scheduling.step.model_namespace": "names of models are the daemon's, whichever repository they are in",
    "sequence_batching.state.use_same_buffer_for_input_output": "state is always computed in place",
    "sequence_batching.state.use_growable_memory": "state has as much memory as it needs",
    "instance_group.secondary_devices": "devices of model.py says on how many a model runs",
    "instance_group.profile": "there are no TensorRT profiles",
    "instance_group.host_policy": "workers.pin and workers.cores place workers",
    "cc_model_filenames": "default_model_filename is loaded on every device",
    "metric_tags": "metrics are labelled with model and version only",
    "model_operations": "no libraries are loaded for a model",
    "model_metrics": "a model's metrics are the same for all models",
}

#: Fields of a Triton Python model that are ignored, as in Triton: field -> what happens instead.
PYTHON_WITHOUT_EFFECT = {
    "batch_input": "a Triton Python model sees the tensors of each request",
    "batch_output": "a Triton Python model answers each request",
}

#: Parameters with a meaning in Triton's Python back end: key -> what happens instead.
PARAMETERS_WITHOUT_EFFECT = {
    "EXECUTION_ENV_PATH": "the model imports what is installed in the daemon's environment",
}

#: The value that asks for nothing, where it is not the field's default.
_NEUTRAL = {"optimization.input_pinned_memory.enable": True, "optimization.output_pinned_memory.enable": True}


def refuse(message: ModelConfig) -> None:
    """Raises Unsupported, with the reason, if a configuration sets a field that this server refuses (``REFUSED``)."""
    for path in _given(message, ""):
        if path in REFUSED:
            raise Unsupported(f"model '{message.name}': {path}: {REFUSED[path]}")


def without_effect(message: ModelConfig) -> list[str]:
    """Returns a sentence, for a warning, about each field and parameter that a configuration sets and that is ignored."""
    paths = dict.fromkeys(path for path in _given(message, "") if path in WITHOUT_EFFECT)
    found = [f"{path} is without effect: {WITHOUT_EFFECT[path]}" for path in paths]
    if message.backend == "python":
        found += [
            f"{field} is without effect: {instead}"
            for field, instead in PYTHON_WITHOUT_EFFECT.items()
            if len(getattr(message, field))
        ]
    found += [
        f"parameter {key} is without effect: {PARAMETERS_WITHOUT_EFFECT[key]}"
        for key in sorted(message.parameters.keys() & PARAMETERS_WITHOUT_EFFECT.keys())
    ]
    return found


def _given(message: Any, prefix: str) -> Iterator[str]:
    """Yields the paths in REFUSED and WITHOUT_EFFECT (such as "a.b") of the fields that a message sets.

    ``prefix``: the path of the message itself, with a dot at its end.
    """
    for field in message.DESCRIPTOR.fields:
        path = prefix + field.name
        value = getattr(message, field.name)
        if path in REFUSED or path in WITHOUT_EFFECT:
            if _says(message, field, value, path):
                yield path
        elif field.message_type is not None:
            for part in _parts(message, field, value):
                yield from _given(part, f"{path}.")


def _says(message: Any, field: FieldDescriptor, value: Any, path: str) -> bool:
    if field.is_repeated:
        return len(value) > 0
    if field.message_type is not None:
        return bool(message.HasField(field.name))
    return bool(value != _NEUTRAL.get(path, field.default_value))


def _parts(message: Any, field: FieldDescriptor, value: Any) -> Iterable[Any]:
    """Returns the messages that a field holds: one, those of a list, or the values of a map if they are messages."""
    if is_map(field) and field.message_type is not None:
        return value.values() if field.message_type.fields_by_name["value"].message_type is not None else ()
    if field.is_repeated:
        return value  # type: ignore[no-any-return]
    return (value,) if message.HasField(field.name) else ()
