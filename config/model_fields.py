"""Lists the fields of Triton's ModelConfig that this server does not use.

A model that sets a field of ``REFUSED`` is not served. A model that sets a field of ``WITHOUT_EFFECT`` is served, and a warning
says that the field is ignored. docs/models.md lists the fields of ``REFUSED`` and ``WITHOUT_EFFECT`` as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tensord.config.model_config import ModelConfig, is_map
from tensord.shm.errors import Unsupported

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
PARAMETERS_WITHOUT_EFFECT = {"EXECUTION_ENV_PATH": "the model imports what is installed in the daemon's environment"}

#: The value that asks for nothing, where it is not the field's default.
_NEUTRAL = {"optimization.input_pinned_memory.enable": True, "optimization.output_pinned_memory.enable": True}


def refuse(config: ModelConfig) -> None:
    """Raises Unsupported if a configuration sets a field that this server refuses. The message says why."""
    for path in _given(config, ""):
        if path in REFUSED:
            raise Unsupported(f"model '{config.name}': {path}: {REFUSED[path]}")


def without_effect(config: ModelConfig) -> list[str]:
    """Returns a sentence about each field and parameter that a configuration sets and this server ignores."""
    paths = dict.fromkeys(path for path in _given(config, "") if path in WITHOUT_EFFECT)
    found = [f"{path} is without effect: {WITHOUT_EFFECT[path]}" for path in paths]
    if config.backend == "python":
        found += [
            f"{field} is without effect: {instead}"
            for field, instead in PYTHON_WITHOUT_EFFECT.items()
            if len(getattr(config, field))
        ]
    found += [
        f"parameter {key} is without effect: {PARAMETERS_WITHOUT_EFFECT[key]}"
        for key in sorted(config.parameters.keys() & PARAMETERS_WITHOUT_EFFECT.keys())
    ]
    return found


def _given(message: Any, prefix: str) -> Iterator[str]:
    """Yields the paths, such as "a.b", of fields that a message sets and the server does not use. All begin with ``prefix``."""
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
    if is_map(field) and field.message_type is not None:
        return value.values() if field.message_type.fields_by_name["value"].message_type is not None else ()
    if field.is_repeated:
        return value  # type: ignore[no-any-return]
    return (value,) if message.HasField(field.name) else ()
