"""A jitted model out of what model.py created: its programs, and what it keeps of sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from config.model_config import ModelConfig
from shm.control_records import Load
from workers.declarations import artifact
from workers.devices.device_cuda import CudaDevice
from workers.devices.several_devices import SeveralDevices
from workers.devices.single_thread import SingleThreadDevice
from workers.imports.model_code import python_source
from workers.loading.parameters import parted
from workers.models.free_state import FreeState, travelling
from workers.models.jax_model import JaxModel
from workers.programs.executable_cache import ExecutableCache
from workers.programs.executables import Apply, Executables
from workers.tensors.buckets import Buckets
from workers.tensors.signature import Signature
from workers.tensors.state import initial_state


def jitted_model(
    record: Load,
    message: ModelConfig,
    described: Signature,
    buckets: Buckets,
    created: tuple[Apply, Any, object],
    instances: int,
    alone: bool,
    several: SeveralDevices | None,
    *,
    cache: ExecutableCache,
    max_unexpected: int,
    cuda: CudaDevice | None,
    single_thread: SingleThreadDevice | None,
    max_state_byte_size: int,
) -> JaxModel:
    """Not warm yet.

    Args:
      described: what it takes and gives, and its state; ``buckets`` are of its programs.
      created: function, parameters, and where state begins.
      instances, alone: as of ``JaxModel``; ``several``: as of ``Executables``.
    Raises: InvalidArgument, Unsupported: it cannot be served.
    """
    apply, parameters, first = created
    initial = initial_state(message, described.states, first, Path(record.model_path)) if described.states else None
    free: FreeState | None = None
    if described.free and initial is not None:
        free = FreeState(described, buckets, initial, max_state_byte_size)
        apply, initial = travelling(apply, described), None
    apply, parameters = parted(apply, parameters)
    source = python_source(Path(record.version_path)) + artifact.digest(Path(record.version_path))
    executables = Executables(
        buckets.signature,
        buckets,
        apply,
        parameters,
        cache,
        source,
        max_unexpected,
        cuda if several is None else None,
        single_thread if several is None else None,
        initial,
        several,
    )
    return JaxModel(
        record.version, buckets.signature, buckets, executables, instances, alone or several is not None, free
    )
