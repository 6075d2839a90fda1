"""Loads one model version: runs its code, completes its configuration, and makes what runs its requests.

Requests are run by a compiled function, by a function on the host, or by objects of the class TritonPythonModel. A worker may
load several versions at a time, each in a thread. As a rule only one of these threads compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from tensord.config import ensemble_checks, model_checks, model_config, rate_limits
from tensord.config.model_config import ModelConfig
from tensord.shm import descriptors
from tensord.shm.common.derivatives import PARAMETER_GRADIENT
from tensord.shm.control_records import Load
from tensord.shm.errors import Internal, InvalidArgument, NoDescriptor, ServingError, Unsupported
from tensord.shm.status_page import StatusPage
from tensord.workers.calls.caller import CallServer, ModelPort
from tensord.workers.calls.metric_registry import MetricRegistry
from tensord.workers.declarations import artifact
from tensord.workers.declarations.created import Created, create, created, is_generator
from tensord.workers.declarations.declaration import (
    batch_rules,
    check_size,
    choose_buckets,
    declare_streams,
    queue_rules,
)
from tensord.workers.declarations.derivatives import check_samples, declared_order, derivatives, named_lacking
from tensord.workers.declarations.step_declaration import StepDeclaration
from tensord.workers.imports import own_flags
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.imports.own_flags import OwnFlags
from tensord.workers.imports.process_state import ProcessState
from tensord.workers.jax_internals.wide import precision
from tensord.workers.loading.declared_version import DeclaredVersion, OfModel, VersionLoad, declared_version
from tensord.workers.loading.ensemble_declaration import load_ensemble
from tensord.workers.loading.instance_groups import Aside, Starting, end
from tensord.workers.loading.jax_loading import InstancePlan, jitted_model, load_stepped, planned_instances, run_samples
from tensord.workers.loading.parameters import host_sets, warn_of_leaves
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models.author_error import described_failure, without_frames
from tensord.workers.models.free_state import program_signature
from tensord.workers.models.host_model import GeneratorModel, HostModel
from tensord.workers.models.instance import Instance, Instantiated
from tensord.workers.models.is_ready_calls import IsReadyCalls
from tensord.workers.models.jax_model import JaxModel, JittedInstance
from tensord.workers.models.loaded_model import InstanceMaker, LoadedModel
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.models.python_model import PythonModel, PythonVersion
from tensord.workers.models.stepped_model import SteppedModel
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.programs.carry import check_state_size
from tensord.workers.programs.load_progress import LoadProgress, Tell
from tensord.workers.programs.run_errors import CheckDevice
from tensord.workers.tensors.buckets import Buckets
from tensord.workers.tensors.signature import Signature
from tensord.workers.threads.cancellation import Cancellation
from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.turns import Turns

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Runnable:
    """Holds what a load has made to run a version's requests: a compiled model, instances that run in threads, or both."""

    jitted: JaxModel | None = None
    stepped: SteppedModel | None = None
    instances: tuple[Instance, ...] = ()
    #: Makes further instances; None: there are none.
    maker: InstanceMaker | None = None
    #: None: the model has no parameters that the server knows.
    sets: ParameterSets | None = None
    #: Calls ``is_ready`` of the model's code; None: it has none.
    is_ready_calls: IsReadyCalls | None = None
    derivatives: tuple[LoadedModel, ...] = ()
    #: As in ``LoadedModel``.
    lacking: dict[str, str] = dataclasses.field(default_factory=dict)


class Loader:
    """Loads model versions for one device: runs their code, compiles their programs and starts their instances."""

    def __init__(
        self,
        target: LoadTarget,
        inbox: Inbox,
        page: StatusPage,
        server: CallServer | None = None,
        aside: Aside = contextlib.nullcontext,
    ) -> None:
        """Creates a loader that has loaded no model.

        Args:
          target: the device, cache and limits to load for.
          inbox: passes functions from the instances' threads to the worker's loop.
          page: the worker's status page.
          server: carries out calls that models make to other models. If it is None, models may not call others.
          aside: returns a context manager. While a thread is in its ``with`` block, another thread may load other models.
        """
        own_flags.prepare(target.shared)
        self._target = target
        options, execution = target.options, target.execution
        self._turns = Turns(options.expert.long_compile)
        self._process = None if target.shared else ProcessState()
        self._server = server
        #: Metrics that models keep themselves.
        self.metrics = MetricRegistry()
        self.compiles = target.cache.compiles
        #: The device for the loader's thread, where samples run while the loop gathers requests on its own.
        self._own = execution.beside()
        self._check: CheckDevice = execution.check
        self._max_queue_size = options.requests.max_queue_size
        limits = rate_limits.limits(options.rate_limit, target.gpu)
        self._starting = Starting(target.gpu, limits, len(target.devices), inbox, page, self._check, aside)

    def load(self, record: Load, tell: Tell = lambda *_: None, cancellation: Cancellation | None = None) -> LoadedModel:
        """Loads a model version. Raises ServingError, with one sentence, if the load fails. Details are in the log.

        ``tell``: called before each program is compiled or taken from the cache. Its arguments: the program's number, from 1;
        the number of programs; how many were compiled so far. ``cancellation``: lets other threads cancel the load.
        """
        progress = LoadProgress(record.name, record.version, tell, cancellation)
        try:
            progress.cancellation.check()
            with self._kept(record):
                return self._load_alone(record, progress)
        except BaseException as error:
            raise without_frames(error) from None

    @contextlib.contextmanager
    def _compiling(self, progress: LoadProgress) -> Iterator[None]:
        """Waits until the calling thread may compile, then runs the ``with`` block. Another thread may load models meanwhile."""
        # Compilation takes much memory, also on a GPU.
        with self._starting.aside(), self._turns.turn(progress.cancellation) as progress.renew:
            yield

    def _kept(self, record: Load) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._process is None else self._process.kept(f"model '{record.name}'")

    def _load_alone(self, record: Load, progress: LoadProgress) -> LoadedModel:
        imports = ModelImports.of_version(record.name, _folders(record))
        flags, started = OwnFlags(record.name), list[Instance]()
        imports.join(ModelPort(record.name, record.version, self._server, self.metrics, flags.code))
        try:
            config = model_config.from_bytes(record.config)
            config.name = config.name or record.name
            if ensemble_checks.is_ensemble(config):
                return load_ensemble(record, config, imports, self._max_queue_size)
            module = self._module(record, config, imports, flags)
            loaded = self._load(VersionLoad(record, config, module, imports, flags, progress, started=started))
            imports.port.loading, imports.port.compiled = False, bool(loaded.jitted or loaded.stepped)
            if self._process is not None:
                imports.port.ran = self._process.watch(f"model '{record.name}'")
            return loaded
        except BaseException as error:
            end(started, imports)
            imports.forget()
            what = f"loading model '{record.name}' version {record.version}"
            raise self._failure(record, what, error, progress.cancellation) from None

    def _module(self, record: Load, config: ModelConfig, imports: ModelImports, flags: OwnFlags) -> ModuleType:
        folder, file = Path(record.version_path), config.default_model_filename or "model.py"
        # Finds modules that were installed since the last load.
        importlib.invalidate_caches()
        if artifact.is_artifact(folder, file):
            return artifact.module(folder, config, self._target.device.platform)
        with flags.code():
            return imports.run(folder / file)

    def _failure(self, record: Load, what: str, error: BaseException, cancellation: Cancellation) -> BaseException:
        # Whatever else went wrong: Cancelled, or DeviceLost below, is raised instead.
        cancellation.check()
        if descriptors.lacked(error):
            return NoDescriptor(described_failure(error, _folders(record)))
        if isinstance(error, (Internal, InvalidArgument, Unsupported)):
            return error
        _log.error("%s failed", what, exc_info=error)
        self._check()
        return Internal(described_failure(error, _folders(record)))

    def _load(self, load: VersionLoad) -> LoadedModel:
        declared = declared_version(load, self._target)
        order = declared_order(load.config, load.module, declared.taken) if load.of is None else load.of.order
        if not order:
            check_samples(load.config, None)
        if declared.steps is not None:
            made = self._stepped(load, declared, declared.steps)
        elif load.config.backend == "python":
            made = self._python(load, declared)
        else:
            made = self._created(load, declared, order)
        record, config = load.record, load.config
        sticky, streams = config.HasField("sequence_batching"), config.model_transaction_policy.decoupled
        compiled = made.jitted or made.stepped
        impure, *hints = [""] if compiled is None else compiled.executables.examined
        # Of sequences and ragged inputs not every model needs all. A jitted model was called impure before its rows were tried.
        hints = hints[:-1] if sticky or declared.taken.ragged else hints
        for sentence in filter(None, hints if made.jitted else (impure, *hints)):
            _log.warning("model '%s': %s", config.name, sentence)
        instances, passive = _by_role(made.instances)
        users = dict[ModelVersion, None]()
        return LoadedModel(
            record.name,
            record.version,
            declared.signature,
            model_config.metadata(config),
            model_config.to_json(config),
            repeatable=not sticky and not streams,
            sticky=sticky,
            streams=streams,
            jitted=made.jitted,
            instances=instances,
            queue_rules=queue_rules(config, self._max_queue_size, record.workers),
            batch_rules=batch_rules(config),
            imports=load.imports,
            cached=config.response_cache.enable,
            is_ready_calls=made.is_ready_calls,
            sees_outputs=config.backend == "python",
            ordered=model_config.is_ordered(config),
            passive=passive,
            is_passive=not self._starting.groups(config).active,
            sequences=declared.sequences,
            made_inputs=declared.made_inputs,
            known_parameters=declared.known_parameters,
            sets=made.sets,
            stepped=made.stepped,
            footprint=load.progress.footprint(),
            record=record,
            pure=made.jitted is not None and not impure and not sticky and not streams,
            # Instances of a model with sequences cannot be regrouped: they have the sequences' slots.
            maker=None if sticky or made.derivatives else made.maker,
            users=users,
            # The code and the parameters are theirs, too, and gone when all are.
            derivatives=tuple(dataclasses.replace(each, users=users) for each in made.derivatives),
            lacking=made.lacking,
        )

    def _stepped(self, load: VersionLoad, declared: DeclaredVersion, steps: StepDeclaration) -> _Runnable:
        with self._compiling(load.progress):
            stepped = load_stepped(load, declared, steps, self._target)
            for sample in load.samples(declared.taken, declared.made_inputs):
                sample.run_stepped(stepped, load.config.name)
        return _Runnable(stepped=stepped, sets=stepped.executables.sets)

    def _python(self, load: VersionLoad, declared: DeclaredVersion) -> _Runnable:
        """Loads a Triton Python model: starts its instances and returns them."""
        config, module, described = load.config, load.module, declared.signature
        if not callable(getattr(module.TritonPythonModel, "execute", None)):
            raise InvalidArgument(f"model '{config.name}': class TritonPythonModel has no function execute(requests)")
        readiness = None
        if hasattr(module.TritonPythonModel, "is_ready"):
            readiness = IsReadyCalls(load.record.name, self._starting.inbox)
        folder, kind = load.record.model_path, "CPU" if self._target.gpu is None else "GPU"
        together = model_config.wants(config, model_checks.PARALLEL_INITIALIZE)
        finalizing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if together else threading.Lock()

        def made(configuration: ModelConfig, _: JaxModel | None) -> Callable[[str], Instantiated]:
            version = PythonVersion(
                module,
                configuration,
                described,
                version=load.record.version,
                repository=folder,
                kind=kind,
                port=load.imports.port,
                sequences=declared.sequences,
                readiness=readiness,
                finalizing=finalizing,
            )
            return functools.partial(PythonModel, version)

        samples = load.samples(described, declared.made_inputs)
        maker = InstanceMaker(made, samples, load.flags.code, load.imports, declared.gpus, one_by_one=not together)
        instances = self._starting.start(config, maker, None, load.progress.cancellation, load.started)
        return _Runnable(instances=instances, maker=maker, is_ready_calls=readiness)

    def _created(self, load: VersionLoad, declared: DeclaredVersion, order: int) -> _Runnable:
        config, module, described = load.config, load.module, declared.taken
        if load.is_host and described.states:
            raise Unsupported(
                f"model '{config.name}': state is for functions that are compiled; a host model keeps its own"
            )
        buckets = _buckets(load, described)
        plan = planned_instances(load, declared, self._starting.groups(config), self._target)
        if not load.is_host:
            limits = self._target.options.executables
            check_size(buckets, limits.max_batch_byte_size)
            check_state_size(buckets.signature, plan.count, limits.max_state_byte_size)
        if load.of is not None:
            function: Created = (load.of.apply, load.of.parameters, None)
        else:
            with precision(described.wide), load.flags.code():
                returned = create(config.name, module, load.folder, model_config.to_dict(config), plan.given)
            function = created(module, described, returned, declared.made_inputs.asked, declared.mixed is not None)
            if is_generator(returned):
                return self._generator(load, declared, function, order)
        if config.model_transaction_policy.decoupled:
            raise InvalidArgument(
                f"model '{config.name}' is decoupled: create() must return a generator function, which yields its responses"
            )
        if load.is_host:
            return self._on_host(HostModel, load, declared, function)
        if load.flags.wide:
            declared = dataclasses.replace(declared, taken=dataclasses.replace(described, doubles=True))
            buckets = _buckets(load, declared.taken)
        made = self._jitted(load, declared, buckets, function, plan)
        return self._with_derivatives(made, load, declared, function, order) if order else made

    def _with_derivatives(
        self, made: _Runnable, load: VersionLoad, declared: DeclaredVersion, function: Created, order: int
    ) -> _Runnable:
        config, module, first, jitted = load.config, load.module, load.of is None, made.jitted
        assert jitted is not None
        apply, parameters, _ = function
        limit = self._target.options.executables.max_batch_byte_size
        kinds, lacking = derivatives(config, module, declared.signature, apply, parameters, limit, first)
        found, failed, further = list[LoadedModel](), dict[str, str](), dict[str, str]()
        for each in kinds:
            record = msgspec.structs.replace(load.record, name=each.config.name)
            progress = LoadProgress(record.name, record.version, cancellation=load.progress.cancellation)
            left = 0 if each.kind == PARAMETER_GRADIENT else order - 1
            its = OfModel(each.apply, parameters, jitted, left)
            try:
                loaded = self._load(
                    VersionLoad(record, each.config, each.module, load.imports, load.flags, progress, its, load.started)
                )
            except ServingError:
                raise
            except Exception as error:  # whatever tracing raises
                load.progress.cancellation.check()
                if descriptors.lacked(error):
                    raise
                failed[each.kind] = described_failure(error, _folders(record))
                continue
            found += [dataclasses.replace(loaded, derivatives=()), *loaded.derivatives]
            further |= loaded.lacking
        further |= named_lacking(config, lacking, failed)
        return dataclasses.replace(made, derivatives=tuple(found), lacking=further)

    def _generator(self, load: VersionLoad, declared: DeclaredVersion, function: Created, order: int) -> _Runnable:
        if declared.mixed is not None or declared.on_demand or order:
            what = "memory_policy 'on_demand'" if declared.on_demand else "derivatives" if order else "batch_sets"
            raise Unsupported(f"model '{load.config.name}': {what} is for jitted functions, a generator is none")
        declare_streams(load.config)
        return self._on_host(GeneratorModel, load, declared, function)

    def _on_host(
        self,
        kind: type[GeneratorModel] | type[HostModel],
        load: VersionLoad,
        declared: DeclaredVersion,
        function: Created,
    ) -> _Runnable:
        apply, parameters, _ = function
        config, described = load.config, declared.taken
        sets = host_sets(config.name, parameters, self._target.room)
        model = kind(load.record.version, described, apply, sets, load.imports.port)
        samples = load.samples(described, declared.made_inputs)
        maker = InstanceMaker(lambda *_: lambda _: model, samples, load.flags.code, load.imports, declared.gpus)
        instances = self._starting.start(config, maker, None, load.progress.cancellation, load.started)
        return _Runnable(instances=instances, maker=maker, sets=sets)

    def _jitted(
        self,
        load: VersionLoad,
        declared: DeclaredVersion,
        buckets: Buckets,
        function: Created,
        plan: InstancePlan,
    ) -> _Runnable:
        config, (_, parameters, _) = load.config, function
        if load.of is None:
            warn_of_leaves(config.name, parameters)
        with self._compiling(load.progress):
            jitted = jitted_model(load, declared, buckets, function, plan, self._target)
            if load.of is not None:
                tried, of = buckets, load.of.jitted.executables.signature
                if of.batches and not buckets.signature.batches:
                    # The first axis numbers rows and has no bucket: one row is tried.
                    rows = str(next(iter(buckets.signature.inputs.values())).axes[0])
                    tried = dataclasses.replace(buckets, axes={**buckets.axes, rows: (1,)})
                jitted.executables.postpone(tried)
                jitted.executables.examined = load.of.jitted.executables.examined[:1]
            else:
                jitted.executables.warm(load.progress)
            if (impure := jitted.executables.examined[0]) and config.response_cache.enable:
                raise InvalidArgument(f"model '{config.name}': its answers are cached (response_cache), but {impure}")
            jitted.prepare_grouped(load.progress.cancellation)
            samples = load.samples(declared.taken, declared.made_inputs)
            own = self._own if plan.several is None else jitted.executables.device
            run_samples(jitted, samples, own, config.name, self._check)
        maker = InstanceMaker(
            self._jitted_instances,
            samples,
            load.flags.code,
            load.imports,
            declared.gpus,
            plan.alone or plan.turns,
            plan.turns,
        )
        cancellation = load.progress.cancellation
        instances = self._starting.start(config, maker, jitted, cancellation, load.started) if plan.threads else ()
        return _Runnable(jitted, instances=instances, maker=maker, sets=jitted.sets)

    def _jitted_instances(self, _: ModelConfig, jitted: JaxModel | None) -> Callable[[str], Instantiated]:
        assert jitted is not None
        return lambda _: JittedInstance(jitted, self._target.execution.beside())

    def regrouped(self, record: Load, former: LoadedModel, cancellation: Cancellation) -> LoadedModel | None:
        """Changes how many instances a model version has, without loading the version again. Returns the changed version.

        ``record``: the version's new configuration. ``former``: the loaded version. The instances that remain keep running.
        Returns None if the number of instances is not the only change in the configuration, or if clients have pushed parameters.
        The caller must then load the version again. Raises ServingError if an instance cannot be started.
        """
        maker, known = former.maker, former.record
        if maker is None or known is None or not record.content or record.config == known.config:
            return None
        if record != msgspec.structs.replace(known, config=record.config):
            return None
        # With a load what clients pushed is gone, and the supervisor has forgotten it.
        if (sets := former.sets) is not None and (sets.pushes or sets.staged):
            return None
        config = model_config.parse_json(former.config.decode(), record.name)
        # Completed first: what the model adds to a configuration then is no change.
        before, asked = [self._completed(config, each, maker) for each in (known, record)]
        same, groups = _without_counts(asked, maker), list(config.instance_group)
        if same not in (_without_counts(before, maker), _without_counts(config, maker)):
            return None
        # The model itself may have set its instance groups.
        if groups != list(before.instance_group) or groups == list(asked.instance_group):
            return None
        del config.instance_group[:]
        config.instance_group.extend(asked.instance_group)
        # Tensors without dims were declared as single numbers when the version was loaded.
        scalars = [tensor.name for tensors in (config.input, config.output) for tensor in tensors if not tensor.dims]
        model_checks.check(config, whole=True, scalars=scalars)
        planned, jitted = self._starting.groups(config), former.jitted
        threads, started = not maker.takes_turns and planned.need_threads, list[Instance]()
        if jitted is not None:
            jitted = jitted.for_instances(planned.active if threads else 1, threads or maker.alone)
        try:
            with self._kept(record):
                instances = (
                    self._starting.start(
                        config, maker, jitted, cancellation, started, (*former.instances, *former.passive)
                    )
                    if threads or jitted is None
                    else ()
                )
        except BaseException as error:
            end(started, maker.imports)
            what = f"starting more instances of model '{record.name}' version {record.version}"
            raise without_frames(self._failure(record, what, error, cancellation)) from None
        active, passive = _by_role(instances)
        return dataclasses.replace(
            former,
            config=model_config.to_json(config),
            jitted=jitted,
            instances=active,
            passive=passive,
            is_passive=not planned.active,
            record=record,
            taken_over=True,
        )

    @staticmethod
    def _completed(config: ModelConfig, record: Load, maker: InstanceMaker) -> ModelConfig:
        given = model_config.from_bytes(record.config)
        given.name, given.backend = config.name, given.backend or config.backend
        model_config.complete(given, maker.gpus)
        return given


def _without_counts(config: ModelConfig, maker: InstanceMaker) -> bytes:
    rest = model_config.empty()
    rest.CopyFrom(config)
    for index, group in enumerate(rest.instance_group):
        if group.name in (rest.name, f"{rest.name}_{index}"):
            group.ClearField("name")
        here = [gpu for gpu in group.gpus if gpu in maker.gpus]
        del group.gpus[:]
        group.gpus.extend(here)
        group.ClearField("count")
    return rest.SerializeToString(deterministic=True)


def _folders(record: Load) -> tuple[Path, Path]:
    """Returns the folders of the version and of the model."""
    return Path(record.version_path), Path(record.model_path)


def _buckets(load: VersionLoad, described: Signature) -> Buckets:
    # State of varying size counts as input.
    described = program_signature(described) if described.free else described
    return choose_buckets(load.config, load.module, described)


def _by_role(instances: tuple[Instance, ...]) -> tuple[tuple[Instance, ...], tuple[Instance, ...]]:
    active, passive = (tuple(each for each in instances if each.planned.passive is held) for held in (False, True))
    return active, passive
