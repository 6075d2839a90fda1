"""The result of loading a model version: its signature, its instances, and the rules of its request queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensord.config.model_config import ModelConfig
from tensord.shm.control_records import Footprint, Load
from tensord.shm.errors import InvalidArgument
from tensord.workers.declarations.request_inputs import KnownParameters
from tensord.workers.declarations.sequence_declaration import MadeInputs, SequencePlan
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.models.instance import Instance, Instantiated
from tensord.workers.models.is_ready_calls import IsReadyCalls
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.models.stepped_model import SteppedModel
from tensord.workers.models.warmup import Sample
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.requests.request import Request, controls_of
from tensord.workers.scheduling.dynamic_batcher import BatchRules
from tensord.workers.scheduling.ensemble_graph import EnsembleGraph
from tensord.workers.scheduling.queue import QueueRules
from tensord.workers.tensors.signature import Signature

if TYPE_CHECKING:
    from tensord.workers.models.model_version import ModelVersion


@dataclass(frozen=True, slots=True)
class InstanceMaker:
    """Makes the instances of a loaded model version."""

    # A later load that changes only the number of instances goes on with this object and the existing instances.
    #: Returns a function from an instance's name to the instance; the second argument is the compiled model, if it is one.
    create: Callable[[ModelConfig, JaxModel | None], Callable[[str], Instantiated]]
    #: Samples that each instance runs before it counts as started.
    prepared: Sequence[Sample]
    #: Makes a context for the model's code, as in ``Instance``.
    code: Callable[[], AbstractContextManager[None]]
    imports: ModelImports
    #: The numbers of the GPUs that it runs on; none on the processor.
    gpus: Sequence[int]
    #: True: requests of this compiled model that cannot share a batch share no call either, however many instances there are.
    alone: bool = False
    #: True: its instances have no threads, but take turns with one program of several devices.
    takes_turns: bool = False
    #: True: an instance is started when the one before has been.
    one_by_one: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the load of a model version gives to the worker: its signature, model and instances, and the rules of its queue."""

    name: str
    version: int
    signature: Signature
    metadata: bytes
    config: bytes
    #: ``repeatable``, ``sticky`` and ``streams`` are as in ``tensord.shm.control_records.ModelState``.
    repeatable: bool
    sticky: bool
    streams: bool
    #: The jitted model, if it is one.
    jitted: JaxModel | None
    #: The threads that run it; none where the worker's loop does.
    instances: tuple[Instance, ...]
    queue_rules: QueueRules
    batch_rules: BatchRules
    #: Its code, to be forgotten when the version is gone.
    imports: ModelImports
    #: True if it asks for the response cache; and if it sees which outputs a client wants.
    cached: bool = False
    sees_outputs: bool = False
    #: Answers leave in the order in which requests were taken.
    ordered: bool = False
    #: Threads that only hold the model, and whether nobody takes requests.
    passive: tuple[Instance, ...] = ()
    is_passive: bool = False
    #: None: its model has no sequences.
    sequences: SequencePlan | None = None
    #: The inputs that are made for it, besides those that clients send.
    made_inputs: MadeInputs = field(default_factory=MadeInputs)
    #: None: any parameters of requests may mean something to it.
    known_parameters: KnownParameters | None = None
    #: Its parameter sets; None: it has no parameters that are arrays.
    sets: ParameterSets | None = None
    #: The model that is stepped, if it is one.
    stepped: SteppedModel | None = None
    #: The graph of an ensemble, which has nothing else to run.
    ensemble: EnsembleGraph | None = None
    #: Calls the function by which a model says itself whether it is ready; None: it has none.
    is_ready_calls: IsReadyCalls | None = None
    #: The time and memory that its load took.
    footprint: Footprint = field(default_factory=Footprint)
    #: The record that asked for it, and how further instances of it are made; None: another number of instances is another load.
    record: Load | None = None
    maker: InstanceMaker | None = None
    #: The same as in ``ModelState``.
    pure: bool = False
    #: It has the code and instances of the version that it replaces: only the number of these has changed.
    taken_over: bool = False
    #: The versions that were made of this code and are not gone yet, the oldest first. They share instances.
    users: dict[ModelVersion, None] = field(default_factory=dict)
    #: Its derivatives, which are served, replaced and unloaded with it.
    derivatives: tuple[LoadedModel, ...] = ()
    #: Name of a derivative that the model lacks -> the reason.
    lacking: dict[str, str] = field(default_factory=dict)

    def join(self, request: Request) -> None:
        """Adds to a request the input tensors that clients do not send, such as the request's priority or its sequence's id.

        If the model has sequences, sets ``request.controls``: the sequence's id, and whether the request starts or ends it.
        If a value is missing or does not fit the tensor's datatype, releases the request's regions and raises InvalidArgument.
        """
        if (plan := self.sequences) is not None:
            controls = controls_of(request.own)
            request.controls = controls if plan.iterative is None else plan.iterative.first_round(controls)
        if self.made_inputs:
            try:
                request.add(self.made_inputs.arrays(request, request.own))
            except InvalidArgument as error:
                request.release()
                raise InvalidArgument(request.label + error.message) from None

    def join_again(self, request: Request) -> None:
        """Gives a request new control inputs for one more run. In the new control inputs, START is cleared."""
        assert self.sequences is not None
        request.controls = request.controls._replace(start=False)
        request.add(self.sequences.controls.arrays(request.controls))
