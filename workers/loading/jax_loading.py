"""Makes JAX models from what ``create`` of model.py returned, and decides on which devices and threads the models run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tensord.config import model_config
from tensord.config.model_checks import ROWS_MAY_MIX
from tensord.shm.errors import Unsupported
from tensord.workers.declarations import artifact
from tensord.workers.declarations.created import Created, create
from tensord.workers.declarations.declaration import choose_buckets
from tensord.workers.declarations.placement_declarations import device_count, given_devices
from tensord.workers.declarations.step_declaration import StepDeclaration, check_buckets, check_stepped, created_steps
from tensord.workers.devices.several_devices import SeveralDevices
from tensord.workers.imports.model_imports import python_source
from tensord.workers.jax_internals.wide import precision
from tensord.workers.loading.declared_version import DeclaredVersion, VersionLoad
from tensord.workers.loading.instance_groups import InstanceGroups
from tensord.workers.loading.parameters import array_names, fixed_names, parted, warn_of_leaves
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models.free_state import FreeState, travelling
from tensord.workers.models.jax_model import JaxModel, JittedInstance
from tensord.workers.models.stepped_model import SteppedModel
from tensord.workers.models.warmup import Sample
from tensord.workers.processor.processor import Processor
from tensord.workers.programs.executable import ExecutionDevice
from tensord.workers.programs.executables import Apply, Executables
from tensord.workers.programs.placed_sets import placed_sets
from tensord.workers.programs.row_probe import rows_apart
from tensord.workers.programs.run_errors import CheckDevice
from tensord.workers.programs.step_executables import StepExecutables
from tensord.workers.programs.step_program import Rows, StepFunctions, StepPrograms
from tensord.workers.tensors.buckets import Buckets
from tensord.workers.tensors.state import initial_state


def run_samples(
    jitted: JaxModel, samples: Sequence[Sample], device: ExecutionDevice, model: str, check: CheckDevice
) -> None:
    """Runs the warmup samples of a model on ``device``, and then closes ``device``.

    ``model``: the model's name, for error messages. ``check``: a function that raises an error if the device has failed.
    """
    try:
        if jitted.free_state is not None:
            for sample in samples:
                sample.begin(jitted.free_state.begun)
        here = jitted if device is jitted.executables.device else JittedInstance(jitted, device)
        for sample in samples:
            sample.run_jitted(jitted, here, model, check)
    finally:
        device.close()


def indexed(apply: Callable[..., Any]) -> Apply:
    """Returns a function ``f``: ``f((stacked, index), inputs)`` returns ``apply(stacked, inputs, index)``.

    ``stacked``: the model's parameters. A parameter that differs between parameter sets has an additional first dimension, with
    a value for each set. ``index``: for each row of ``inputs``, the index of the row's parameter set in that dimension.
    """

    @functools.wraps(apply)
    def of_pair(parameters: tuple[Any, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        stacked, index = parameters
        made: dict[str, Any] = apply(stacked, inputs, index)
        return made

    return of_pair


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """How the instances of a JAX model run: their devices, and whether each has a thread or the worker's loop runs them."""

    #: The device or devices that ``create`` gets.
    given: jax.Device | tuple[jax.Device, ...]
    #: The devices of a model that runs on several; None: the worker's first device.
    several: SeveralDevices | None
    #: True if each instance has a thread; False: the worker's loop runs the model.
    threads: bool
    #: How many threads execute the model.
    count: int
    #: True if all instances use one program in turn; none of them has a thread then.
    turns: bool
    #: Requests that cannot share a batch share no call of a program either, however many instances there are.
    alone: bool


def planned_instances(
    load: VersionLoad, declared: DeclaredVersion, groups: InstanceGroups, target: LoadTarget
) -> InstancePlan:
    """Decides on which devices and threads the instances of a JAX or host model run.

    ``load``: the version. ``declared``: what its model.py says. ``groups``: its instance groups. ``target``: the worker.
    """
    config, module, mixed = load.config, load.module, declared.mixed
    given, several = given_devices(config, module, target.devices, target.gpu, bool(declared.taken.states))
    if mixed is not None and several is not None:
        raise Unsupported(f"model '{config.name}': batch_sets is for models that run on one device")
    if declared.on_demand and (several is not None or mixed is not None):
        which = "that run on one device" if mixed is None else "whose batches do not mix parameter sets (batch_sets)"
        raise Unsupported(f"model '{config.name}': memory_policy 'on_demand' is for models {which}")
    turns, threads = several is not None or mixed is not None, groups.need_threads
    if turns and threads and not load.is_host:
        groups.take_turns(config.name, "a JAX model on several devices" if mixed is None else "a model with batch_sets")
        threads = False
    alone = config.HasField("sequence_batching") or bool(declared.made_inputs)
    return InstancePlan(given, several, threads, groups.active if threads else 1, turns, alone)


def jitted_model(
    load: VersionLoad,
    declared: DeclaredVersion,
    buckets: Buckets,
    created: Created,
    plan: InstancePlan,
    target: LoadTarget,
) -> JaxModel:
    """Makes a model from the function and parameters (``created``) that the model author's code returned. Compiles nothing.

    ``load``: the model's files, configuration and JAX settings. ``declared``: the tensors and other properties that the author
    declared. ``plan``: the model's instances and devices. ``target``: the worker's device and options. Raises Internal if no
    memory is left.
    """
    apply, parameters, first = created
    described, several, limits = declared.taken, plan.several, target.options.executables
    apply = load.flags.applied(apply)
    folder = Path(load.record.model_path)
    initial = initial_state(load.config, described.states, first, folder) if described.states else None
    free: FreeState | None = None
    if described.free and initial is not None:
        free = FreeState(described, buckets, initial, limits.max_state_byte_size)
        apply, initial = travelling(apply, described), None
    names, fixed = array_names(parameters), fixed_names(parameters)
    apply, parameters = parted(apply, parameters)
    if declared.mixed is not None:
        apply = indexed(apply)
    device = target.execution if several is None else Processor()
    sets = (
        placed_sets(
            buckets.signature,
            parameters,
            names,
            several,
            target.room,
            declared.mixed,
            device.remote,
            declared.on_demand,
            fixed,
        )
        if load.of is None
        # A push into the model is one into its derivatives.
        else load.of.jitted.sets
    )
    executables = Executables(
        buckets.signature,
        buckets,
        apply,
        sets,
        target.cache,
        python_source(load.folder) + artifact.digest(load.folder),
        limits.max_unexpected_shapes,
        device,
        initial,
        several,
        not model_config.wants(load.config, ROWS_MAY_MIX),
    )
    alone = plan.threads or plan.alone or several is not None
    return JaxModel(load.record.version, buckets.signature, buckets, executables, plan.count, alone, free)


def load_stepped(
    load: VersionLoad, declared: DeclaredVersion, steps: StepDeclaration, target: LoadTarget
) -> SteppedModel:
    """Creates and compiles a model that runs step by step.

    Raises ServingError if the model cannot be served. Errors of the model's code are raised unchanged.
    """
    config, module, flags, described = load.config, load.module, load.flags, declared.taken
    check_stepped(config, described)
    if device_count(config, module) > 1:
        raise Unsupported(f"model '{config.name}': a stepped model runs on one device")
    buckets = choose_buckets(config, module, described)
    check_buckets(buckets)
    with precision(described.wide), flags.code():
        returned = create(config.name, module, load.folder, model_config.to_dict(config), target.device)
    if flags.wide:
        described = dataclasses.replace(described, doubles=True)
        buckets = choose_buckets(config, module, described)
    functions, parameters = created_steps(config.name, returned, declared.made_inputs.asked)
    warn_of_leaves(config.name, parameters)
    executables, rows = _executables(load, declared, steps, target, buckets, functions, parameters)
    executables.check_size(target.options.executables.max_state_byte_size)
    executables.warm(load.progress)
    remote = target.device.platform != "cpu"
    model = SteppedModel(load.record.version, described, buckets, executables, rows, steps, remote)
    if steps.rules.slots > 1 and not target.cache.good_rows(executables.noted):
        why, check = next(filter(None, executables.examined[:2]), ""), target.execution.check
        traced = executables.traced["step"]
        found = rows_apart(described.model, model.find_fault, check, traced, steps.rules.slots, "slots", why)
        target.cache.good_rows(executables.noted, found=found)
    executables.traced.clear()
    return model


def _executables(
    load: VersionLoad,
    declared: DeclaredVersion,
    steps: StepDeclaration,
    target: LoadTarget,
    buckets: Buckets,
    functions: StepFunctions,
    parameters: Any,
) -> tuple[StepExecutables, Rows]:
    described, slots = buckets.signature, steps.rules.slots
    parts = [parted(load.flags.applied(function), parameters) for function in functions]
    rows = Rows(described)
    sets = placed_sets(
        described,
        parts[0][1],
        array_names(parameters),
        room=target.room,
        remote=target.execution.remote,
        on_demand=declared.on_demand,
        fixed=fixed_names(parameters),
    )
    programs = StepPrograms(
        StepFunctions(*(function for function, _ in parts)), described, slots, rows, steps.insert_rows
    )
    made = StepExecutables(
        described,
        buckets,
        programs,
        slots,
        steps.step_slots,
        steps.insert_rows,
        sets,
        target.cache,
        python_source(load.folder),
        target.execution,
    )
    return made, rows
