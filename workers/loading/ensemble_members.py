"""What an ensemble has of the models that it is made of, which are in the same worker before it."""

from __future__ import annotations

import dataclasses

from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.scheduling.ensemble_graph import EnsembleGraph, Step
from tensord.workers.tensors.signature import Signature


def joined(loaded: LoadedModel, models: ModelTable) -> tuple[LoadedModel, list[LoadedModel]]:
    """The ensemble with what its members say of it, and these, in the order of its steps. Raises NotFound: one is not there."""
    assert loaded.ensemble is not None
    members = [models.find(step.model, step.version) for step in loaded.ensemble.steps]
    graph = loaded.ensemble
    steps = [
        step._replace(outputs=_in_its_order(step, member), streams=member.loaded.streams)
        for step, member in zip(graph.steps, members, strict=True)
    ]
    ensemble = dataclasses.replace(
        loaded,
        signature=_labelled(loaded.signature, graph, members),
        repeatable=all(member.loaded.repeatable for member in members),
        sticky=any(member.loaded.sticky for member in members),
        streams=any(member.loaded.streams for member in members),
        ensemble=EnsembleGraph(graph.inputs, graph.outputs, steps, graph.most),
    )
    return ensemble, [member.loaded for member in members]


def _in_its_order(step: Step, member: ModelVersion) -> dict[str, str]:
    return {name: step.outputs[name] for name in member.signature.outputs if name in step.outputs}


def _labelled(signature: Signature, graph: EnsembleGraph, members: list[ModelVersion]) -> Signature:
    """Outputs without labels of their own have those of the outputs that they are."""
    outputs = dict(signature.outputs)
    for step, member in zip(graph.steps, members, strict=True):
        for name, tensor in step.outputs.items():
            if tensor in outputs and not outputs[tensor].labels:
                outputs[tensor] = dataclasses.replace(outputs[tensor], labels=member.signature.outputs[name].labels)
    return dataclasses.replace(signature, outputs=outputs)
