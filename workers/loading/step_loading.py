"""Loads a stepped model: one that computes many requests together, step by step.

model.py ─▶ declared ─▶ checked ─▶ create ─▶ programs: traced, checked, compiled, run once
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tensord.config import model_config
from tensord.shm.errors import Unsupported
from tensord.workers.declarations.created import create
from tensord.workers.declarations.declaration import choose_buckets
from tensord.workers.declarations.device_choice import device_count
from tensord.workers.declarations.step_declaration import StepDeclaration, check_buckets, check_stepped, created_steps
from tensord.workers.imports.model_imports import python_source
from tensord.workers.jax_internals.wide import precision
from tensord.workers.loading.declared_version import DeclaredVersion, VersionLoad
from tensord.workers.loading.parameters import array_names, fixed_names, parted, warn_of_leaves
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models.stepped_model import SteppedModel
from tensord.workers.programs.placed_sets import placed_sets
from tensord.workers.programs.step_executables import StepExecutables
from tensord.workers.programs.step_program import Rows, StepFunctions, StepPrograms
from tensord.workers.tensors.buckets import Buckets


def load_stepped(
    load: VersionLoad, declared: DeclaredVersion, steps: StepDeclaration, target: LoadTarget
) -> SteppedModel:
    """Creates a stepped model (it computes many requests together, step by step) and compiles its programs.

    Raises: ServingError: the model cannot be served; or whatever the model's code raises.
    """
    message, module, flags, described = load.message, load.module, load.flags, declared.taken
    check_stepped(message, described)
    if device_count(message, module) > 1:
        raise Unsupported(f"model '{message.name}': a stepped model runs on one device")
    buckets = choose_buckets(message, module, described)
    check_buckets(buckets)
    with precision(described.wide), flags.code():
        returned = create(message.name, module, load.folder, model_config.to_dict(message), target.device)
    if flags.wide:
        described = dataclasses.replace(described, doubles=True)
        buckets = choose_buckets(message, module, described)
    functions, parameters = created_steps(message.name, returned, declared.made_inputs.asked)
    warn_of_leaves(message.name, parameters)
    executables, rows = _executables(load, declared, steps, target, buckets, functions, parameters)
    executables.check_size(target.options.executables.max_state_byte_size)
    executables.warm(load.progress)
    return SteppedModel(
        load.record.version, described, buckets, executables, rows, steps, target.device.platform != "cpu"
    )


def _executables(
    load: VersionLoad,
    declared: DeclaredVersion,
    steps: StepDeclaration,
    target: LoadTarget,
    buckets: Buckets,
    functions: StepFunctions,
    parameters: Any,
) -> tuple[StepExecutables, Rows]:
    """Places a stepped model's parameters. Returns its programs, not compiled yet, and the layout of a row of their results."""
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
