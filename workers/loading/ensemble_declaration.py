"""An ensemble as its configuration declares it: all of it, because it has no code."""

from __future__ import annotations

from pathlib import Path

from tensord.config import ensemble_fusion, model_checks, model_config
from tensord.config.model_config import ModelConfig
from tensord.shm.control_records import Load
from tensord.workers.declarations.declaration import read_labels
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.scheduling.dynamic_batcher import BatchRules
from tensord.workers.scheduling.ensemble_graph import EnsembleGraph, Step
from tensord.workers.scheduling.queue import QueueRules
from tensord.workers.tensors.signature import signature


def load_ensemble(record: Load, message: ModelConfig, imports: ModelImports, max_queue_size: int) -> LoadedModel:
    """What it takes from its members it gets when it is adopted (``tensord.workers.loading.ensemble_members``)."""
    model_config.complete(message)
    model_checks.check(message, whole=True)
    return LoadedModel(
        record.name,
        record.version,
        signature(message, {}, read_labels(message, Path(record.model_path))),
        model_config.metadata(message),
        model_config.to_json(message),
        repeatable=True,
        sticky=False,
        streams=message.model_transaction_policy.decoupled,
        jitted=None,
        instances=(),
        queue_rules=QueueRules(max_queue_size),
        # What waits together goes together, where its steps are programs only.
        batch_rules=BatchRules(max(1, message.max_batch_size), joins=message.max_batch_size > 0),
        imports=imports,
        cached=message.response_cache.enable,
        sees_outputs=True,
        ensemble=_graph(message),
        fuses=ensemble_fusion.is_wanted(message),
    )


def _graph(message: ModelConfig) -> EnsembleGraph:
    """Of a checked configuration. Which steps stream is their models' to say."""
    scheduling = message.ensemble_scheduling
    steps = [
        Step(step.model_name, max(0, step.model_version), dict(step.input_map), dict(step.output_map))
        for step in scheduling.step
    ]
    inputs, outputs = [field.name for field in message.input], [field.name for field in message.output]
    return EnsembleGraph(inputs, outputs, steps, scheduling.max_inflight_requests)
