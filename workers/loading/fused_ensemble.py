"""An ensemble as one XLA program, where its configuration asks for that: the parameter ``tensord_fuse``.

The functions of its models are traced one into the other, so XLA sees all of it: one call instead of several, and what lies
between two models need not be written to memory. It is then run like a model that is compiled. Its models' queues, limits and
programs have no part in it; each is counted as if it had run, with an even share of the time.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple

from tensord.config import ensemble_fusion, model_config
from tensord.shm.control_records import Load
from tensord.shm.errors import Internal, InvalidArgument, ServingError
from tensord.workers.declarations.declaration import check_size, choose_buckets
from tensord.workers.devices.device_cuda import CudaDevice
from tensord.workers.devices.single_thread import SingleThreadDevice
from tensord.workers.models.author_error import describe_exception
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.models.loaded_model import LoadedModel
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.programs.executables import Apply, Executables
from tensord.workers.programs.load_progress import LoadProgress

_log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """One of the functions."""

    apply: Apply
    #: Input of the model -> ensemble tensor; output of the model -> ensemble tensor.
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def fuse(
    record: Load,
    loaded: LoadedModel,
    members: Sequence[LoadedModel],
    progress: LoadProgress,
    *,
    compiling: Callable[[LoadProgress], AbstractContextManager[None]],
    cache: ExecutableCache,
    cuda: CudaDevice | None,
    single_thread: SingleThreadDevice | None,
    max_batch_byte_size: int,
) -> LoadedModel:
    """Belongs to the loader's thread.

    Args:
      members: what its steps run, in their order.
    Raises: InvalidArgument: that cannot be one program.  Internal: a function fails when it is traced.
    """
    graph = loaded.ensemble
    assert graph is not None
    models: list[JaxModel] = []
    for member in members:
        if member.jitted is None or member.made_inputs:
            why = "is not compiled" if member.jitted is None else "is told of a request's parameters"
            raise InvalidArgument(ensemble_fusion.describe(loaded.name, f"model '{member.name}' {why}"))
        if member.signature.wide != loaded.signature.wide:
            one, other = ("", "no ") if member.signature.wide else ("no ", "")
            why = f"model '{member.name}' has {one}tensors of 64-bit elements, and the ensemble has {other}such"
            if member.signature.doubles:
                why = f"model '{member.name}' sets jax_enable_x64, and the ensemble has no tensors of 64-bit elements"
            raise InvalidArgument(ensemble_fusion.describe(loaded.name, why))
        if member.jitted.executables.several is not None:
            why = f"model '{member.name}' runs on devices of its own"
            raise InvalidArgument(ensemble_fusion.describe(loaded.name, why))
        models.append(member.jitted)
    message = model_config.parse_json(loaded.config.decode(), loaded.name)
    buckets = choose_buckets(message, ModuleType(loaded.name), loaded.signature)
    check_size(buckets, max_batch_byte_size)
    order = graph.in_order()
    parts = [_Part(models[number].executables.apply, *graph.steps[number][2:4]) for number in order]
    executables = Executables(
        loaded.signature,
        buckets,
        _composed(parts, loaded.signature.outputs),
        tuple([models[number].executables.parameters for number in order]),
        cache,
        b"".join([models[number].executables.source for number in order]),
        0,
        cuda,
        single_thread,
    )
    jitted = JaxModel(record.version, loaded.signature, buckets, executables)
    try:
        with compiling(progress):
            executables.warm(progress)
    except ServingError:
        raise
    except Exception as error:  # in the models' own functions
        _log.error("making one program of ensemble '%s' failed", loaded.name, exc_info=error)
        raise Internal(describe_exception(error)) from error
    return dataclasses.replace(loaded, jitted=jitted, footprint=progress.footprint())


def _composed(parts: Sequence[_Part], outputs: Mapping[str, object]) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        tensors = dict(inputs)
        for part, own in zip(parts, parameters, strict=True):
            made = part.apply(own, {name: tensors[tensor] for name, tensor in part.inputs.items()})
            tensors.update({tensor: made[name] for name, tensor in part.outputs.items()})
        return {name: tensors[name] for name in outputs}

    return apply
