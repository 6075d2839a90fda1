"""Loads ensembles (graphs of models, without code) from their configuration and from the models that they consist of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tensord.config import model_checks, model_config
from tensord.config.ensemble_checks import non_existing_output
from tensord.config.model_checks import REPLACE_WAITING
from tensord.config.model_config import ModelConfig, wants
from tensord.shm.control_records import Load
from tensord.workers.declarations.declaration import read_labels
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.scheduling.dynamic_batcher import BatchRules
from tensord.workers.scheduling.ensemble_graph import EnsembleGraph, EnsembleStep
from tensord.workers.scheduling.queue import QueueRules
from tensord.workers.tensors.signature import Signature, signature


def load_ensemble(record: Load, config: ModelConfig, imports: ModelImports, max_queue_size: int) -> LoadedModel:
    """Makes an ensemble from its configuration. ``joined`` later sets the properties that depend on the steps' models."""
    model_config.complete(config)
    model_checks.check(config, whole=True)
    return LoadedModel(
        record.name,
        record.version,
        signature(config, {}, read_labels(config, Path(record.model_path))),
        model_config.metadata(config),
        model_config.to_json(config),
        repeatable=True,
        sticky=False,
        streams=config.model_transaction_policy.decoupled,
        jitted=None,
        instances=(),
        queue_rules=QueueRules(max_queue_size, replaces=wants(config, REPLACE_WAITING)),
        # Requests that wait together run together, where the steps are programs only.
        batch_rules=BatchRules(max(1, config.max_batch_size), joins=config.max_batch_size > 0),
        imports=imports,
        cached=config.response_cache.enable,
        sees_outputs=True,
        ensemble=_graph(config),
    )


def _graph(config: ModelConfig) -> EnsembleGraph:
    """Returns the graph of an ensemble's steps."""
    scheduling = config.ensemble_scheduling
    steps = [
        EnsembleStep(step.model_name, max(0, step.model_version), dict(step.input_map), dict(step.output_map))
        for step in scheduling.step
    ]
    inputs, outputs = [field.name for field in config.input], [field.name for field in config.output]
    # ``joined`` finds out which steps stream.
    return EnsembleGraph(inputs, outputs, steps, scheduling.max_inflight_requests)


def joined(loaded: LoadedModel, models: ModelTable) -> LoadedModel:
    """Returns a copy of the ensemble ``loaded`` with the properties that depend on its steps' models, such as ``streams``.

    Raises NotFound: a model of a step is not served. Raises InvalidArgument: such a model lacks an output that a step needs, or
    all its instances are passive.
    """
    assert loaded.ensemble is not None
    members = [models.find(step.model, step.version) for step in loaded.ensemble.steps]
    graph = loaded.ensemble
    steps: list[EnsembleStep] = []
    for step, member in zip(graph.steps, members, strict=True):
        # Whoever checked them may have seen an earlier load of the member.
        for name in step.outputs.keys() - member.signature.outputs.keys():
            raise non_existing_output(loaded.name, step.outputs[name], name, member.name)
        ordered = {name: step.outputs[name] for name in member.signature.outputs if name in step.outputs}
        steps.append(step._replace(outputs=ordered, streams=member.loaded.streams))
    return dataclasses.replace(
        loaded,
        signature=_labelled(loaded.signature, graph, members),
        repeatable=all(member.loaded.repeatable for member in members),
        pure=all(member.loaded.pure for member in members),
        sticky=any(member.loaded.sticky for member in members),
        streams=any(member.loaded.streams for member in members),
        ensemble=EnsembleGraph(graph.inputs, graph.outputs, steps, graph.most),
    )


def _labelled(signature: Signature, graph: EnsembleGraph, members: list[ModelVersion]) -> Signature:
    """Adds class labels to outputs of an ensemble that have none: those of the member that computes the output."""
    outputs = dict(signature.outputs)
    for step, member in zip(graph.steps, members, strict=True):
        for name, tensor in step.outputs.items():
            if tensor in outputs and not outputs[tensor].labels:
                outputs[tensor] = dataclasses.replace(outputs[tensor], labels=member.signature.outputs[name].labels)
    return dataclasses.replace(signature, outputs=outputs)
