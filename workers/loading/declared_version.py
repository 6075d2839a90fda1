"""Reads and checks what a model version's model.py and configuration declare, before the model is created."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tensord.config import model_checks, model_config
from tensord.config.model_config import ModelConfig
from tensord.shm.control_records import Load
from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations.declaration import declare_tensors, read_labels
from tensord.workers.declarations.declaration_names import check_names
from tensord.workers.declarations.placement_declarations import declare_sets, gpus, is_on_demand
from tensord.workers.declarations.request_inputs import KnownParameters, request_inputs
from tensord.workers.declarations.sequence_declaration import MadeInputs, SequencePlan, sequence_plan
from tensord.workers.declarations.step_declaration import StepDeclaration, declare_steps
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.imports.own_flags import OwnFlags
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models.instance import Instance
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.models.python_model import auto_complete
from tensord.workers.models.warmup import Sample, samples
from tensord.workers.parameters.set_stack import SetDeclaration
from tensord.workers.programs.load_progress import LoadProgress
from tensord.workers.tensors.ragged import declare_ragged, ragged_signature
from tensord.workers.tensors.signature import Signature, signature
from tensord.workers.tensors.state import declare_state, state_specs


@dataclass(frozen=True, slots=True)
class OfModel:
    """The function and parameters of a loaded model M, of which a derivative is being loaded, such as ``M.pull_back``."""

    apply: Callable[..., Any]
    #: The model's parameters, as ``create`` returned them.
    parameters: Any
    jitted: JaxModel
    #: How many orders of derivatives the derivative has in turn.
    order: int


@dataclass(slots=True)
class VersionLoad:
    """One load of a model version: which version it is, its configuration, Python module, progress and started instances."""

    record: Load
    #: The configuration, to which ``declared_version`` adds what model.py declares.
    config: ModelConfig
    module: ModuleType
    imports: ModelImports
    #: Settings of JAX that the model's code has changed for itself.
    flags: OwnFlags
    progress: LoadProgress
    #: What this load makes a derivative of; None: it makes a model of its own.
    of: OfModel | None = None
    #: The instances that were started for it and for its derivatives.
    started: list[Instance] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.record.version_path)

    @property
    def is_host(self) -> bool:
        """True if the model's function runs on the host and is not compiled."""
        return bool(getattr(self.module, "host", False))

    def samples(self, described: Signature, made_inputs: MadeInputs) -> list[Sample]:
        """Makes the version's warmup samples. Raises InvalidArgument: a sample does not fit the model, or cannot be read.

        ``described``: the model's tensors. ``made_inputs``: the inputs that the worker adds to each request; samples lack them.
        """
        nobody = made_inputs.nobody
        inputs = {name: spec for name, spec in described.inputs.items() if name not in nobody and not spec.of_batch}
        return samples(self.config, replace(described, inputs=inputs), Path(self.record.model_path), nobody)


@dataclass(frozen=True, slots=True)
class DeclaredVersion:
    """The checked declarations of a version's model.py and configuration, such as the tensors and the GPUs."""

    #: The tensors that clients send and get.
    signature: Signature
    #: The tensors of the model itself: also those that the worker makes, and the state of sequences.
    taken: Signature
    #: None: the model has no sequences.
    sequences: SequencePlan | None
    made_inputs: MadeInputs
    #: None: the model's own code reads the parameters of requests.
    known_parameters: KnownParameters | None
    #: Slots and steps of a stepped model; None: it is none.
    steps: StepDeclaration | None
    #: The parameters that differ between parameter sets; None: a batch has one set.
    mixed: SetDeclaration | None
    #: True if the model's parameters may leave the device to make room for those of others.
    on_demand: bool
    #: The numbers of the GPUs that the model runs on; none on the processor.
    gpus: Sequence[int]


#: Tensor -> names of its axes; None for an axis without a name.
_Axes = dict[str, tuple[str | None, ...]]


class _Names(NamedTuple):
    axes: _Axes
    state_axes: _Axes
    #: SEGMENT_IDS input -> the ragged input that it describes.
    segments: dict[str, str]


def declared_version(load: VersionLoad, target: LoadTarget) -> DeclaredVersion:
    """Completes and checks the configuration of the version to load, and returns all declarations of configuration and model.py.

    Raises InvalidArgument or Unsupported if the model cannot be served here. Errors of the model's ``auto_complete_config`` are
    raised unchanged.
    """
    names = _declared_names(load)
    config, module = load.config, load.module
    compiled = config.backend == "jax"
    steps = declare_steps(config, module) if compiled else None
    run_on = gpus(config, module, len(target.devices), target.gpu)
    model_config.complete(config, run_on)
    scalars = [name for name, declared in names.axes.items() if not declared]
    model_checks.check(config, whole=True, scalars=scalars)
    model_checks.check_device(config, target.gpu)
    described = signature(config, names.axes, read_labels(config, Path(load.record.model_path)))
    mixed, on_demand = declare_sets(config, module), is_on_demand(config, module)
    sequences = sequence_plan(config, target.options.requests.max_queue_size)
    asked = request_inputs(config, module) if compiled else None
    known = KnownParameters(config, module, target.options) if compiled else None
    made_inputs = MadeInputs(None if sequences is None else sequences.controls, asked)
    taken = replace(described, inputs={**described.inputs, **made_inputs.specs})
    if compiled:
        taken = ragged_signature(taken, config, names.segments)
    if config.sequence_batching.state and sequences is not None:
        states = state_specs(config, names.state_axes)
        taken = replace(taken, states=states, slots=sequences.rules.slots)
    return DeclaredVersion(described, taken, sequences, made_inputs, known, steps, mixed, on_demand, run_on)


def _declared_names(load: VersionLoad) -> _Names:
    config, module = load.config, load.module
    triton = hasattr(module, "TritonPythonModel")
    config.backend = config.backend or ("python" if triton else "jax")
    if config.backend not in model_checks.BACKENDS:
        model_checks.check(config)
    if config.backend == "python":
        if not triton:
            raise InvalidArgument(f"model '{config.name}': model.py has no class TritonPythonModel")
        with load.flags.code():
            load.config = auto_complete(module, config, load.imports.port)
        return _Names({}, {}, {})
    if not callable(getattr(module, "create", None)):
        raise InvalidArgument(f"model '{config.name}': model.py has no function create(path, config, device)")
    check_names(config, module)
    axes = declare_tensors(config, module)
    state_axes = declare_state(config, module)
    return _Names(axes, state_axes, declare_ragged(config, module))
