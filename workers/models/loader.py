"""Brings one model version into memory: its code, its completed configuration, its executables or instances.

    Load record ─▶ model.py in a module of its own ─▶ configuration: given, declared, completed, checked
                ─▶ jitted function with executables  |  host-side function  |  TritonPythonModel objects

Runs in the worker's loader thread, one version after the other.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import jax

from config import model_checks, model_config, rate_limits
from config.model_config import ModelConfig
from config.options import Options
from shm.control_records import Load
from shm.errors import Internal, InvalidArgument, Unsupported
from shm.status_page import StatusPage
from workers.devices import single_thread
from workers.devices.device_cuda import CudaDevice
from workers.devices.single_thread import SingleThreadDevice
from workers.imports.model_code import python_source
from workers.imports.model_imports import ModelImports
from workers.models.created import created
from workers.models.declaration import (
    batch_rules,
    check_size,
    choose_buckets,
    declare_tensors,
    queue_rules,
    read_labels,
)
from workers.models.execution import describe_exception
from workers.models.host_model import HostModel
from workers.models.instance import Instance, Instantiated
from workers.models.instance_groups import InstanceGroups
from workers.models.jax_model import JaxModel
from workers.models.jitted_instance import JittedInstance
from workers.models.made_inputs import MadeInputs
from workers.models.parameters import parted
from workers.models.python_model import PythonModel, auto_complete
from workers.models.request_inputs import request_inputs
from workers.models.sequence_declaration import SequencePlan, sequence_plan
from workers.models.warmup import Sample, samples
from workers.programs.carry import check_state_size
from workers.programs.executable_cache import ExecutableCache, cache_directory
from workers.programs.executables import Executables
from workers.programs.jax_cache import use_persistent_cache
from workers.programs.load_progress import LoadProgress, Tell, nobody
from workers.programs.precision import precision
from workers.programs.run_errors import CheckDevice, works
from workers.scheduling.dynamic_batcher import BatchRules
from workers.scheduling.queue import QueueRules
from workers.tensors.signature import Signature, signature
from workers.tensors.state import declare_state, initial_state, state_specs
from workers.threads.inbox import Inbox

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the loader hands to the worker's loop."""

    name: str
    version: int
    signature: Signature
    metadata: bytes
    config: bytes
    #: As in ``shm.control_records.ModelState``.
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
    #: Whether it asks for the response cache, and whether it is told which outputs a client wants.
    cached: bool = False
    sees_outputs: bool = False
    #: Answers leave in the order in which requests were taken.
    ordered: bool = False
    #: Threads that only hold the model, and whether nobody takes requests.
    passive: tuple[Instance, ...] = ()
    is_passive: bool = False
    #: None: its model has no sequences.
    sequences: SequencePlan | None = None
    #: What it takes besides what clients send.
    made_inputs: MadeInputs = field(default_factory=MadeInputs)


class Loader:
    """Loads versions on one device."""

    def __init__(
        self,
        device: jax.Device,
        gpu: int | None,
        cache: ExecutableCache,
        inbox: Inbox,
        page: StatusPage,
        max_queue_size: int,
        max_unexpected_shapes: int,
        max_batch_byte_size: int,
        cuda: CudaDevice | None = None,
        single_thread: SingleThreadDevice | None = None,
        max_state_byte_size: int = sys.maxsize,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        """``cuda``: the GPU as the thread has it that will run what is loaded. ``limits``: as of ``InstanceGroups``."""
        self._device = device
        self._gpu = gpu
        self._cuda = cuda
        #: The GPU as this thread has it: the loop gathers requests on the other while samples run here.
        self._own_cuda = None if cuda is None else cuda.beside()
        self._check: CheckDevice = works if cuda is None else cuda.check
        self._single_thread = single_thread
        self._cache = cache
        self._inbox = inbox
        self._page = page
        self._max_queue_size = max_queue_size
        self._max_unexpected_shapes = max_unexpected_shapes
        self._max_batch_byte_size = max_batch_byte_size
        self._max_state_byte_size = max_state_byte_size
        self._limits = limits

    @classmethod
    def configured(
        cls,
        options: Options,
        gpu: int | None,
        device: jax.Device,
        inbox: Inbox,
        page: StatusPage,
        cuda: CudaDevice | None = None,
    ) -> Loader:
        """One as the configuration says, with JAX's own cache turned on."""
        directory = cache_directory(options.executables.cache_directory)
        small = single_thread.choose(device, options.workers.single_thread_flops)
        programs = use_persistent_cache(directory)
        return cls(
            device,
            gpu,
            ExecutableCache(directory, programs),
            inbox,
            page,
            options.requests.max_queue_size,
            options.executables.max_unexpected_shapes,
            options.executables.max_batch_byte_size,
            cuda,
            small,
            options.executables.max_state_byte_size,
            rate_limits.limits(options.rate_limit, gpu),
        )

    def load(self, record: Load, tell: Tell = nobody) -> LoadedModel:
        """Brings it into memory. ``tell(number, total)``: executable ``number`` of ``total`` is begun.

        Raises: ServingError: with one calm sentence, whatever went wrong; details are in the log.
        """
        progress = LoadProgress(record.name, record.version, tell)
        folders = (Path(record.version_path), Path(record.model_path))
        imports = ModelImports.of_version(record.name, folders)
        try:
            message = model_config.from_bytes(record.config)
            message.name = message.name or record.name
            # What was installed since the last model is found.
            importlib.invalidate_caches()
            module = imports.run(folders[0] / (message.default_model_filename or "model.py"))
            return self._load(record, message, module, imports, progress)
        except BaseException as error:
            imports.forget()
            if isinstance(error, (Internal, InvalidArgument, Unsupported)):
                raise
            _log.error("loading model '%s' version %d failed", record.name, record.version, exc_info=error)
            self._check()
            raise Internal(f"Internal: {describe_exception(error)}") from error

    def _load(
        self,
        record: Load,
        message: ModelConfig,
        module: ModuleType,
        imports: ModelImports,
        progress: LoadProgress,
    ) -> LoadedModel:
        triton = hasattr(module, "TritonPythonModel")
        message.backend = message.backend or ("python" if triton else "jax")
        if message.backend not in model_checks.BACKENDS:
            model_checks.check(message)
        if message.backend == "python":
            if not triton:
                raise InvalidArgument(f"model '{message.name}': model.py has no class TritonPythonModel")
            message = auto_complete(module, message)
            axes: dict[str, tuple[str | None, ...]] = {}
        else:
            if not callable(getattr(module, "create", None)):
                raise InvalidArgument(f"model '{message.name}': model.py has no function create(path, config, device)")
            axes = declare_tensors(message, module)
            declare_state(message, module)
        model_config.complete(message, self._gpu)
        model_checks.check(message, whole=True)
        model_checks.check_device(message, self._gpu)
        if self._gpu is not None and any(group.kind == type(group).KIND_CPU for group in message.instance_group):
            _log.warning("model '%s': KIND_CPU is without effect: this worker runs its models on its GPU", message.name)
        described = signature(message, axes, read_labels(message, Path(record.model_path)))
        sequences = sequence_plan(message, self._max_queue_size)
        asked = request_inputs(message, module) if message.backend == "jax" else None
        made_inputs = MadeInputs(None if sequences is None else sequences.controls, asked)
        taken = described.with_inputs(made_inputs.specs)
        if message.sequence_batching.state and sequences is not None:
            taken = taken.with_states(state_specs(message), sequences.rules.slots)
        jitted: JaxModel | None = None
        instances: tuple[Instance, ...]
        if message.backend == "python":
            if not callable(getattr(module.TritonPythonModel, "execute", None)):
                raise InvalidArgument(
                    f"model '{message.name}': class TritonPythonModel has no function execute(requests)"
                )
            instances = self._python_instances(record, message, module, described, sequences, made_inputs)
        else:
            jitted, instances = self._create(record, message, module, taken, progress, made_inputs)
        sticky, streams = message.HasField("sequence_batching"), message.model_transaction_policy.decoupled
        return LoadedModel(
            record.name,
            record.version,
            described,
            model_config.metadata(message),
            model_config.to_json(message),
            not sticky and not streams,
            sticky,
            streams,
            jitted,
            tuple(instance for instance in instances if not instance.passive),
            queue_rules(message, self._max_queue_size, record.workers),
            batch_rules(message),
            imports,
            cached=message.response_cache.enable,
            sees_outputs=message.backend == "python",
            ordered=model_config.is_ordered(message),
            passive=tuple(instance for instance in instances if instance.passive),
            is_passive=not self._groups(message).active,
            sequences=sequences,
            made_inputs=made_inputs,
        )

    def _create(
        self,
        record: Load,
        message: ModelConfig,
        module: ModuleType,
        described: Signature,
        progress: LoadProgress,
        made_inputs: MadeInputs,
    ) -> tuple[JaxModel | None, tuple[Instance, ...]]:
        host = bool(getattr(module, "host", False))
        if host and described.states:
            raise Unsupported(
                f"model '{message.name}': state is for functions that are compiled; a host model keeps its own"
            )
        buckets = choose_buckets(message, module, described)
        groups = self._groups(message)
        # What waits for resources has a thread of its own, also where there is only one of it.
        threads = groups.active > 1 or groups.limited
        if threads and not host and self._cuda is not None:
            groups.take_turns(message.name)
            threads = False
        count = groups.active if threads else 1
        if not host:
            check_size(buckets, self._max_batch_byte_size)
            check_state_size(described, count, self._max_state_byte_size)
        with precision(described):
            returned = module.create(Path(record.version_path), model_config.to_dict(message), self._device)
        apply, parameters, first = created(message.name, returned, described.states, made_inputs.asked)
        if host:
            model = HostModel(record.version, described, apply, parameters)
            return None, self._start(message, lambda _: model, self._samples(record, message, described, made_inputs))
        initial = initial_state(message, described.states, first, Path(record.model_path)) if described.states else None
        apply, parameters = parted(apply, parameters)
        executables = Executables(
            described,
            buckets,
            apply,
            parameters,
            self._cache,
            python_source(Path(record.version_path)),
            self._max_unexpected_shapes,
            self._cuda,
            self._single_thread,
            initial,
        )
        jitted = JaxModel(
            record.version,
            described,
            buckets,
            executables,
            count,
            alone=threads or message.HasField("sequence_batching") or bool(made_inputs),
        )
        executables.warm(progress)
        prepared = self._samples(record, message, described, made_inputs)
        try:
            here = jitted if self._own_cuda is None else JittedInstance(jitted, self._own_cuda)
            for sample in prepared:
                sample.run_jitted(jitted, here, message.name, self._check)
        finally:
            if self._own_cuda is not None:
                self._own_cuda.close()
        if not threads:
            return jitted, ()
        return jitted, self._start(message, lambda _: JittedInstance(jitted), prepared)

    def _python_instances(
        self,
        record: Load,
        message: ModelConfig,
        module: ModuleType,
        described: Signature,
        sequences: SequencePlan | None,
        made_inputs: MadeInputs,
    ) -> tuple[Instance, ...]:
        kind = "CPU" if self._gpu is None else "GPU"
        return self._start(
            message,
            lambda instance: PythonModel(
                module, message, described, record.version, record.model_path, instance, kind, sequences
            ),
            self._samples(record, message, described, made_inputs),
        )

    @staticmethod
    def _samples(record: Load, message: ModelConfig, described: Signature, made_inputs: MadeInputs) -> list[Sample]:
        """The samples of ``model_warmup``. They are of no sequence, and say nothing but their tensors."""
        nobody = made_inputs.nobody
        return samples(message, described.without_inputs(nobody), Path(record.model_path), nobody)

    def _groups(self, message: ModelConfig) -> InstanceGroups:
        return InstanceGroups(message, self._gpu, self._limits)

    def _start(
        self,
        message: ModelConfig,
        create: Callable[[str], HostModel | PythonModel | JittedInstance],
        prepared: Sequence[Sample],
    ) -> tuple[Instance, ...]:
        """One thread for each configured instance, each initialised and warm. One that fails takes the others down."""

        def warm(model: Instantiated) -> None:
            for sample in prepared:
                sample.run(model, message.name, self._check)

        started: list[Instance] = []
        try:
            for planned in self._groups(message):
                made = functools.partial(create, planned.name)
                instance = Instance(planned.name, made, self._inbox, self._page, warm, self._check)
                instance.passive, instance.needs, instance.priority = planned.passive, planned.needs, planned.priority
                instance.start()
                started.append(instance)
        except BaseException:
            for instance in started:
                instance.close(lambda: None)
            raise
        return tuple(started)
