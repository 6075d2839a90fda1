"""Loads a stepped model, for ``tensord.workers.loading.loader``.

model.py ─▶ declared ─▶ checked ─▶ create ─▶ programs: traced, checked, compiled, run once
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

from tensord.config import model_config
from tensord.config.model_config import ModelConfig
from tensord.shm.control_records import Load
from tensord.shm.errors import Unsupported
from tensord.workers.declarations.created import create
from tensord.workers.declarations.declaration import choose_buckets
from tensord.workers.declarations.device_choice import device_count
from tensord.workers.declarations.memory_policy import is_on_demand
from tensord.workers.declarations.request_inputs import RequestInputs
from tensord.workers.declarations.step_declaration import StepDeclaration, check_buckets, check_stepped, created_steps
from tensord.workers.imports.model_imports import python_source
from tensord.workers.imports.own_flags import OwnFlags
from tensord.workers.loading.parameters import array_names, parted, warn_of_leaves
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models.stepped_model import SteppedModel
from tensord.workers.programs.load_progress import LoadProgress
from tensord.workers.programs.placed_sets import placed_sets
from tensord.workers.programs.precision import precision
from tensord.workers.programs.step_executables import StepExecutables
from tensord.workers.programs.step_program import Rows, StepFunctions, StepPrograms
from tensord.workers.tensors.signature import Signature


def load_stepped(
    record: Load,
    message: ModelConfig,
    module: ModuleType,
    described: Signature,
    declared: StepDeclaration,
    asked: RequestInputs | None,
    flags: OwnFlags,
    progress: LoadProgress,
    target: LoadTarget,
) -> SteppedModel:
    """Creates a stepped model (it computes many requests together, step by step) and compiles its programs.

    Args:
      described: the model's signature; its inputs include the properties of requests that its insert function asks for.
      declared: what model.py declares about slots and steps.
      asked: these properties; None: none.
      progress: is told of each program, and has the cancellation of the load.
      flags: settings of JAX that the model's code has changed for itself.
    Raises: ServingError: the model cannot be served; or whatever the model's code raises.
    """
    check_stepped(message, described)
    if device_count(message, module) > 1:
        raise Unsupported(f"model '{message.name}': a stepped model runs on one device")
    buckets = choose_buckets(message, module, described)
    check_buckets(buckets)
    folder, rules = Path(record.version_path), declared.rules
    with precision(described), flags.code():
        returned = create(message.name, module, folder, model_config.to_dict(message), target.device)
    if flags.wide:
        described = dataclasses.replace(described, doubles=True)
        buckets = choose_buckets(message, module, described)
    functions, parameters = created_steps(message.name, returned, asked)
    warn_of_leaves(message.name, parameters)
    parts = [parted(flags.applied(function), parameters) for function in functions]
    rows = Rows(described)
    sets = placed_sets(
        described,
        parts[0][1],
        array_names(parameters),
        room=target.room,
        remote=target.execution.remote,
        on_demand=is_on_demand(message, module),
    )
    executables = StepExecutables(
        described,
        buckets,
        StepPrograms(
            StepFunctions(*(function for function, _ in parts)), described, rules.slots, rows, declared.insert_rows
        ),
        rules.slots,
        declared.step_slots,
        declared.insert_rows,
        sets,
        target.cache,
        python_source(folder),
        target.execution,
    )
    executables.check_size(target.options.executables.max_state_byte_size)
    executables.warm(progress)
    return SteppedModel(
        record.version, described, buckets, executables, rows, declared, target.device.platform != "cpu"
    )
