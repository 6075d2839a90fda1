"""Makes the instances of a model version: when it is loaded, and when its configuration asks for another number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tensord.config.model_config import ModelConfig
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.models.instance import Instantiated
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.models.warmup import Sample


@dataclass(frozen=True, slots=True)
class InstanceMaker:
    """What is needed to make an instance of a loaded model version: functions, warmup samples, imports, numbers of GPUs.

    A later load (loading) that changes only the number of instances takes over the code and the instances, and uses this object.
    """

    #: Returns a function from an instance's name to the instance; the second argument is the compiled model, if it is one.
    create: Callable[[ModelConfig, JaxModel | None], Callable[[str], Instantiated]]
    #: Samples that each instance runs before it counts as started.
    prepared: Sequence[Sample]
    #: Makes a context for the model's code, as in ``Instance``.
    code: Callable[[], AbstractContextManager[None]]
    imports: ModelImports
    #: The numbers of the GPUs that it runs on; none on the processor.
    gpus: Sequence[int]
    #: Of a compiled model: requests that cannot share a batch share no call either, however many instances there are.
    alone: bool = False
    #: And its instances have no threads, but take turns with one program of several devices.
    takes_turns: bool = False
