"""Makes a jitted model from what ``create`` of model.py returned: its programs, and the state of its sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensord.config.model_config import ModelConfig
from tensord.shm.control_records import Load
from tensord.workers.declarations import artifact
from tensord.workers.devices.several_devices import SeveralDevices
from tensord.workers.imports.model_imports import python_source
from tensord.workers.loading.parameters import array_names, parted
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models.free_state import FreeState, travelling
from tensord.workers.models.jax_model import JaxModel, JittedInstance
from tensord.workers.models.warmup import Sample
from tensord.workers.parameters.set_stack import SetDeclaration
from tensord.workers.processor.processor import Processor
from tensord.workers.programs.executables import Apply, Executables
from tensord.workers.programs.execution_device import ExecutionDevice
from tensord.workers.programs.placed_sets import placed_sets
from tensord.workers.programs.run_errors import CheckDevice
from tensord.workers.tensors.buckets import Buckets
from tensord.workers.tensors.signature import Signature
from tensord.workers.tensors.state import initial_state


def run_samples(
    jitted: JaxModel, prepared: Sequence[Sample], own: ExecutionDevice, model: str, check: CheckDevice
) -> None:
    """Runs each warm-up sample on a jitted model, before the model serves.

    Args:
      prepared: the samples.
      own: the device for the calling thread; it is closed afterwards.
      check: raises DeviceLost if the device failed.
    Raises: InvalidArgument: a sample failed.
    """
    if jitted.free_state is not None:
        for sample in prepared:
            sample.begin(jitted.free_state.begun)
    try:
        here = jitted if own is jitted.executables.device else JittedInstance(jitted, own)
        for sample in prepared:
            sample.run_jitted(jitted, here, model, check)
    finally:
        own.close()


def indexed(apply: Callable[..., Any]) -> Apply:
    """Turns ``apply(stacked parameters, inputs, index)`` into a function of two arguments: (stacked parameters, index), inputs.

    ``index``: the parameter set of each row.
    """

    @functools.wraps(apply)
    def of_pair(parameters: tuple[Any, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        stacked, index = parameters
        made: dict[str, Any] = apply(stacked, inputs, index)
        return made

    return of_pair


def jitted_model(
    record: Load,
    message: ModelConfig,
    described: Signature,
    buckets: Buckets,
    created: tuple[Apply, Any, object],
    instances: int,
    alone: bool,
    several: SeveralDevices | None,
    target: LoadTarget,
    mixed: SetDeclaration | None = None,
    on_demand: bool = False,
) -> JaxModel:
    """Makes a jitted model, whose programs are not compiled yet.

    Args:
      described: the model's tensors and state.
      buckets: the shapes of the model's programs.
      created: the function, its parameters and the initial state.
      instances: how many threads execute the model.
      alone: requests that cannot share a batch may not share a call of a program either.
      several: the devices, if the model runs on several; None: the worker's first device.
      mixed: which parameters differ between sets; None: a batch has one parameter set.
      on_demand: whether parameters may leave the device for other parameters.
    Raises: InvalidArgument, Unsupported: the model cannot be served.  Internal: there is no memory for its parameters.
    """
    apply, parameters, first = created
    limits = target.options.executables
    initial = initial_state(message, described.states, first, Path(record.model_path)) if described.states else None
    free: FreeState | None = None
    if described.free and initial is not None:
        free = FreeState(described, buckets, initial, limits.max_state_byte_size)
        apply, initial = travelling(apply, described), None
    names = array_names(parameters)
    apply, parameters = parted(apply, parameters)
    if mixed is not None:
        apply = indexed(apply)
    source = python_source(Path(record.version_path)) + artifact.digest(Path(record.version_path))
    device = target.execution if several is None else Processor()
    sets = placed_sets(buckets.signature, parameters, names, several, target.room, mixed, device.remote, on_demand)
    executables = Executables(
        buckets.signature,
        buckets,
        apply,
        sets,
        target.cache,
        source,
        limits.max_unexpected_shapes,
        device,
        initial,
        several,
    )
    return JaxModel(
        record.version, buckets.signature, buckets, executables, instances, alone or several is not None, free
    )
