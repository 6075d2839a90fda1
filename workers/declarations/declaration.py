"""Combines what model.py and config.pbtxt declare: tensors, buckets, labels, and the rules for queues and batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tensord.config import model_checks
from tensord.config.model_checks import REPLACE_WAITING, ROWS_MAY_MIX
from tensord.config.model_config import ModelConfig, wants
from tensord.config.model_folder import regular
from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations.declaration_names import flag
from tensord.workers.scheduling.dynamic_batcher import BatchRules
from tensord.workers.scheduling.queue import QueuePolicy, QueueRules
from tensord.workers.tensors.buckets import MAX_EXECUTABLES, Buckets, check_sizes, powers_of_two
from tensord.workers.tensors.signature import Declared, Signature, TensorSpec, declare, parse_declaration
from tensord.workers.tensors.tensor_trees import declarations

_MAX_LABEL_BYTE_SIZE = 16 << 20


def declare_tensors(config: ModelConfig, module: ModuleType) -> dict[str, tuple[str | None, ...]]:
    """Adds the inputs, outputs, batch size and response cache that model.py declares to the model's configuration.

    Returns a dict: tensor name -> a name for each axis. An axis without a name has None. Raises InvalidArgument if a
    declaration is malformed or contradicts the configuration.
    """
    tensors: dict[str, dict[str, Declared]] = {}
    for kind in ("inputs", "outputs"):
        what = f"model '{config.name}'"
        tensors[kind] = {
            name: parse_declaration(f"{what}: {kind[:-1]} '{name}'", text)
            for name, text in declarations(what, getattr(module, kind, {}), kind[:-1]).items()
        }
    declare(config, tensors["inputs"], tensors["outputs"], getattr(module, "source", "model.py"))
    if not config.output:
        raise InvalidArgument(
            f'model \'{config.name}\': no outputs are declared, neither in model.py, as in outputs = {{"y": "FP32[4]"}}, '
            "nor in config.pbtxt; inputs are declared alike"
        )
    limit = getattr(module, "max_batch_size", 0)
    if type(limit) is not int or limit < 0:
        raise InvalidArgument(f"model '{config.name}': max_batch_size of model.py is {limit!r}, a number is expected")
    config.max_batch_size = config.max_batch_size or limit
    if flag(config.name, module, "response_cache") and not config.HasField("response_cache"):
        config.response_cache.enable = True
    if flag(config.name, module, "rows_may_mix") and ROWS_MAY_MIX not in config.parameters:
        config.parameters[ROWS_MAY_MIX].string_value = "true"
    return {name: tensor.axes for group in tensors.values() for name, tensor in group.items()}


def declare_streams(config: ModelConfig) -> None:
    """Changes ``config`` to say that its model answers each request with any number of responses.

    Call it if the model's ``create`` has returned a generator function. Raises InvalidArgument or Unsupported if ``config``
    does not allow that, for example if it has ``sequence_batching``, ``response_cache`` or ``allow_ragged_batch``.
    """
    config.model_transaction_policy.decoupled = True
    if config.HasField("sequence_batching"):
        raise InvalidArgument(
            f"model '{config.name}': create() returned a generator function, and those have no sequences"
        )
    if any(tensor.allow_ragged_batch for tensor in config.input):
        raise InvalidArgument(
            f"model '{config.name}': create() returned a generator function, and those have no ragged inputs: "
            "they run one request at a time"
        )
    model_checks.check(config)


def choose_buckets(config: ModelConfig, module: ModuleType, described: Signature) -> Buckets:
    declared = getattr(module, "buckets", {})
    if not isinstance(declared, Mapping):
        raise InvalidArgument(f"model '{config.name}': buckets of model.py must be a dict of axis names to sizes")
    axes = {
        str(axis): () if sizes == "auto" else check_sizes(f"model '{config.name}': buckets of axis '{axis}'", sizes)
        for axis, sizes in declared.items()
    } | model_checks.axis_buckets(config)
    _check_axes(config, module, axes)
    limit = described.max_batch_size
    batch: tuple[int, ...] = (1,)
    if not limit and ("batch_buckets" in config.parameters or hasattr(module, "batch_buckets")):
        raise InvalidArgument(
            f"model '{config.name}': batch_buckets are given, but max_batch_size is 0: it has no batch dimension"
        )
    if limit > 0:
        batch = model_checks.batch_buckets(config)
        if not batch and hasattr(module, "batch_buckets"):
            batch = check_sizes(f"model '{config.name}': batch_buckets", module.batch_buckets, limit)
        if wants(config, ROWS_MAY_MIX):
            batch = tuple(range(1, limit + 1))
        # With ragged inputs a row more costs next to nothing, but each number of rows needs a program for each length.
        batch = batch or ((limit,) if described.ragged else powers_of_two(limit))
        if batch[-1] < limit:
            batch = (*batch, limit)
    buckets = Buckets(described, batch, axes)
    count = sum(1 for _ in itertools.islice(buckets.planned(), len(batch) * (MAX_EXECUTABLES + 1)))
    if count > MAX_EXECUTABLES and not getattr(module, "host", False):
        raise InvalidArgument(
            f"model '{config.name}': its buckets need {count} executables, at most {MAX_EXECUTABLES} are made"
        )
    return buckets


def check_size(buckets: Buckets, limit: int) -> None:
    """Raises InvalidArgument if the inputs and outputs of the largest batch together can exceed ``limit`` bytes."""
    described = buckets.signature
    fixed = sum(_byte_size(spec, spec.model_dims) for spec in described.outputs.values() if -1 not in spec.model_dims)
    most = buckets.batch[-1]
    for rows, shapes in buckets.planned():
        sizes = [
            _byte_size(spec, shape or ()) * (1 if spec.whole else rows)
            for spec, shape in zip(described.inputs.values(), shapes, strict=True)
        ]
        size = rows * fixed + sum(sizes)
        if rows == most and size > limit:
            raise InvalidArgument(
                f"model '{described.model}': inputs and outputs of a batch of {rows} have {size} bytes, "
                f"executables.max_batch_byte_size allows {limit}"
            )


def _byte_size(spec: TensorSpec, shape: tuple[int, ...]) -> int:
    return spec.dtype.itemsize * math.prod(shape)


def _check_axes(config: ModelConfig, module: ModuleType, buckets: Mapping[str, object]) -> None:
    """Raises InvalidArgument if buckets are declared for an axis that no input has."""
    texts = declarations(f"model '{config.name}'", getattr(module, "inputs", {}), "input")
    declared = [parse_declaration(name, text) for name, text in texts.items()]
    named = {axis for tensor in declared for axis in tensor.axes if axis is not None}
    unknown = sorted(buckets.keys() - named)
    if unknown:
        known = f"they name {', '.join(map(repr, sorted(named))) or 'none'}"
        raise InvalidArgument(
            f"model '{config.name}': there are buckets for axis {', '.join(map(repr, unknown))}, which no input has: {known}"
        )


def read_labels(config: ModelConfig, folder: Path) -> dict[str, tuple[str, ...]]:
    """Returns output name -> the lines of its label file in ``folder``. Raises InvalidArgument: a file is unreadable."""
    labels: dict[str, tuple[str, ...]] = {}
    for output in config.output:
        if not output.label_filename:
            continue
        try:
            with open(folder / output.label_filename, encoding="utf-8-sig", opener=regular) as file:
                labels[output.name] = tuple(file.read(_MAX_LABEL_BYTE_SIZE).splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"model '{config.name}': label file '{output.label_filename}' of output '{output.name}' cannot be read"
            ) from error
    return labels


def queue_rules(config: ModelConfig, max_size: int, workers: int) -> QueueRules:
    """Returns the rules of a model's queue in one worker.

    ``max_size``: the most requests that may wait in the queue. The sizes in ``config`` are divided by the number ``workers``.
    """
    replaces = wants(config, REPLACE_WAITING)
    if not config.HasField("dynamic_batching"):
        return QueueRules(max_size, replaces=replaces)
    batching = config.dynamic_batching
    return QueueRules(
        max_size,
        _policy(batching.default_queue_policy, workers),
        {level: _policy(policy, workers) for level, policy in batching.priority_queue_policy.items()},
        max(1, batching.priority_levels),
        max(1, batching.default_priority_level),
        replaces,
    )


def _policy(policy: Any, workers: int) -> QueuePolicy:
    return QueuePolicy(
        math.ceil(policy.max_queue_size / workers),
        policy.default_timeout_microseconds * 1000,
        policy.allow_timeout_override,
        policy.timeout_action == type(policy).DELAY,
    )


def batch_rules(config: ModelConfig) -> BatchRules:
    """Returns the rules by which a model's requests form batches."""
    asked = config.HasField("dynamic_batching")
    yields = config.backend != "python" and config.model_transaction_policy.decoupled
    if config.max_batch_size < 1 or yields or (config.backend == "python" and not asked):
        return BatchRules(joins=False)
    if wants(config, ROWS_MAY_MIX):
        return BatchRules(config.max_batch_size, joins=False)
    batching = config.dynamic_batching
    delay_ns = batching.max_queue_delay_microseconds * 1000
    return BatchRules(config.max_batch_size, delay_ns, tuple(sorted(set(batching.preferred_batch_size))))
