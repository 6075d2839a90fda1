"""Loads one model version: its code, its completed configuration, its executables or instances.

    Load record ─▶ model.py in a module of its own ─▶ configuration: given, declared, completed, checked
                ─▶ jitted function with executables  |  host-side function  |  TritonPythonModel objects

Runs in threads of the worker's loader: one model is compiled at a time, while others are created and initialised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from tensord.config import ensemble_checks, model_checks, model_config, rate_limits
from tensord.config.model_config import ModelConfig
from tensord.shm.control_records import Load
from tensord.shm.errors import Internal, InvalidArgument, Unsupported
from tensord.shm.status_page import StatusPage
from tensord.workers.calls.caller import CallServer, ModelPort
from tensord.workers.calls.metric_registry import MetricRegistry
from tensord.workers.declarations import artifact
from tensord.workers.declarations.created import create, created, is_generator
from tensord.workers.declarations.declaration import (
    batch_rules,
    check_size,
    choose_buckets,
    declare_streams,
    declare_tensors,
    queue_rules,
    read_labels,
)
from tensord.workers.declarations.device_choice import given_devices, gpus
from tensord.workers.declarations.made_inputs import MadeInputs
from tensord.workers.declarations.memory_policy import is_on_demand
from tensord.workers.declarations.request_inputs import request_inputs
from tensord.workers.declarations.sequence_declaration import sequence_plan
from tensord.workers.declarations.set_declaration import declare_sets
from tensord.workers.declarations.step_declaration import declare_steps
from tensord.workers.imports import own_flags
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.imports.own_flags import OwnFlags
from tensord.workers.imports.process_state import ProcessState
from tensord.workers.loading.ensemble_declaration import load_ensemble
from tensord.workers.loading.instance_groups import Aside, Starting, compiling_alone
from tensord.workers.loading.jax_loading import jitted_model, run_samples
from tensord.workers.loading.parameters import host_sets, warn_of_keys, warn_of_leaves
from tensord.workers.loading.step_loading import load_stepped
from tensord.workers.loading.target import LoadTarget
from tensord.workers.models.author_error import described_failure, without_frames
from tensord.workers.models.free_state import program_signature
from tensord.workers.models.generator_model import GeneratorModel
from tensord.workers.models.host_model import HostModel
from tensord.workers.models.instance import Instance, Instantiated
from tensord.workers.models.is_ready_calls import IsReadyCalls
from tensord.workers.models.jax_model import JaxModel, JittedInstance
from tensord.workers.models.loaded_model import InstanceMaker, LoadedModel
from tensord.workers.models.python_model import PythonModel, auto_complete
from tensord.workers.models.stepped_model import SteppedModel
from tensord.workers.models.warmup import prepared_samples
from tensord.workers.parameters.parameter_set import ParameterSets
from tensord.workers.parameters.set_stack import SetDeclaration
from tensord.workers.programs.carry import check_state_size
from tensord.workers.programs.load_progress import LoadProgress, Tell, nobody
from tensord.workers.programs.precision import precision
from tensord.workers.programs.run_errors import CheckDevice
from tensord.workers.tensors.ragged import declare_ragged, ragged_signature
from tensord.workers.tensors.signature import Signature, signature
from tensord.workers.tensors.state import declare_state, state_specs
from tensord.workers.threads.cancellation import Cancellation
from tensord.workers.threads.inbox import Inbox
from tensord.workers.threads.turns import Turns

_log = logging.getLogger(__name__)


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
        """
        Args:
          target: the device, the cache of programs and the limits to load for.
          inbox: calls from other threads to the worker's loop.
          page: the worker's status page.
          server: carries out calls that models make to other models; None: no model is served.
          aside: makes a context that the loader's thread enters while other loads may go on.
        """
        own_flags.prepare()
        self._target = target
        options, execution = target.options, target.execution
        self._compiling = functools.partial(compiling_alone, aside, Turns(1, options.expert.long_compile))
        self._process = None if target.shared else ProcessState()
        self._server = server
        #: Metrics that models keep themselves.
        self.metrics = MetricRegistry()
        self.compiles = target.cache.compiles
        self._devices = target.devices
        self._gpu = target.gpu
        #: The device for the loader's thread, where samples run while the loop gathers requests on its own.
        self._own = execution.beside()
        self._check: CheckDevice = execution.check
        self._max_queue_size = options.requests.max_queue_size
        limits = rate_limits.limits(options.rate_limit, target.gpu)
        self._starting = Starting(target.gpu, limits, len(self._devices), inbox, page, self._check, aside)

    def load(self, record: Load, tell: Tell = nobody, cancellation: Cancellation | None = None) -> LoadedModel:
        """Loads a model version: runs its code, compiles its programs and starts its instances.

        ``tell``: called before each program is compiled or read from the cache, with its number, how many there are, and how many
        were compiled so far.

        Raises: ServingError: loading failed; the message is one sentence, and details are in the log.  Cancelled:
        the load was cancelled.
        """
        progress = LoadProgress(record.name, record.version, tell, cancellation)
        try:
            progress.cancellation.check()
            with self._kept(record):
                return self._load_alone(record, progress)
        except BaseException as error:
            raise without_frames(error) from None

    def _kept(self, record: Load) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._process is None else self._process.kept(f"model '{record.name}'")

    def _load_alone(self, record: Load, progress: LoadProgress) -> LoadedModel:
        folders = (Path(record.version_path), Path(record.model_path))
        imports = ModelImports.of_version(record.name, folders)
        flags = OwnFlags(record.name)
        imports.join(ModelPort(record.name, record.version, self._server, self.metrics, flags.code))
        try:
            message = model_config.from_bytes(record.config)
            message.name = message.name or record.name
            if ensemble_checks.is_ensemble(message):
                return load_ensemble(record, message, imports, self._max_queue_size)
            # Finds modules that were installed since the last load.
            importlib.invalidate_caches()
            file = message.default_model_filename or "model.py"
            if artifact.is_artifact(folders[0], file):
                module = artifact.module(folders[0], message, self._target.device.platform)
            else:
                with flags.code():
                    module = imports.run(folders[0] / file)
            loaded = self._load(record, message, module, imports, flags, progress)
            imports.port.loading = False
            if self._process is not None:
                imports.port.ran = self._process.watch(f"model '{record.name}'")
            return loaded
        except BaseException as error:
            imports.forget()
            # A load that nobody wants any more ends as cancelled, whatever else went wrong.
            progress.cancellation.check()
            if isinstance(error, (Internal, InvalidArgument, Unsupported)):
                raise
            _log.error("loading model '%s' version %d failed", record.name, record.version, exc_info=error)
            self._check()
            raise Internal(described_failure(error, folders)) from error

    def _load(
        self,
        record: Load,
        message: ModelConfig,
        module: ModuleType,
        imports: ModelImports,
        flags: OwnFlags,
        progress: LoadProgress,
    ) -> LoadedModel:
        triton = hasattr(module, "TritonPythonModel")
        message.backend = message.backend or ("python" if triton else "jax")
        if message.backend not in model_checks.BACKENDS:
            model_checks.check(message)
        if message.backend == "python":
            if not triton:
                raise InvalidArgument(f"model '{message.name}': model.py has no class TritonPythonModel")
            with flags.code():
                message = auto_complete(module, message, imports.port)
            axes: dict[str, tuple[str | None, ...]] = {}
            segments: dict[str, str] = {}
            state_axes: dict[str, tuple[str | None, ...]] = {}
        else:
            if not callable(getattr(module, "create", None)):
                raise InvalidArgument(f"model '{message.name}': model.py has no function create(path, config, device)")
            axes = declare_tensors(message, module)
            state_axes = declare_state(message, module)
            segments = declare_ragged(message, module)
        steps = declare_steps(message, module) if message.backend == "jax" else None
        run_on = gpus(message, module, len(self._devices), self._gpu)
        model_config.complete(message, run_on)
        scalars = [name for name, declared in axes.items() if not declared]
        model_checks.check(message, whole=True, scalars=scalars)
        model_checks.check_device(message, self._gpu)
        described = signature(message, axes, read_labels(message, Path(record.model_path)))
        mixed, on_demand = declare_sets(message, module), is_on_demand(message, module)
        sequences = sequence_plan(message, self._max_queue_size)
        asked = request_inputs(message, module) if message.backend == "jax" else None
        made_inputs = MadeInputs(None if sequences is None else sequences.controls, asked)
        taken = described.with_inputs(made_inputs.specs)
        if message.backend == "jax":
            taken = ragged_signature(taken, message, segments)
        if message.sequence_batching.state and sequences is not None:
            taken = taken.with_states(state_specs(message, state_axes), sequences.rules.slots)
        jitted: JaxModel | None = None
        stepped: SteppedModel | None = None
        instances: tuple[Instance, ...] = ()
        maker: InstanceMaker | None = None
        is_ready_calls: IsReadyCalls | None = None
        sets: ParameterSets | None = None
        if steps is not None:
            with self._compiling(progress):
                stepped = load_stepped(record, message, module, taken, steps, asked, flags, progress, self._target)
                stepped.warm(prepared_samples(record, message, taken, made_inputs))
                sets = stepped.executables.sets
        elif message.backend == "python":
            if not callable(getattr(module.TritonPythonModel, "execute", None)):
                raise InvalidArgument(
                    f"model '{message.name}': class TritonPythonModel has no function execute(requests)"
                )
            is_ready_calls = IsReadyCalls.of(module, record.name, self._starting.inbox)
            kind = "CPU" if self._gpu is None else "GPU"
            python = functools.partial(
                PythonModel.maker, record, module, described, kind, imports.port, sequences, is_ready_calls
            )
            maker = InstanceMaker(
                lambda configuration, _: python(configuration),
                prepared_samples(record, message, described, made_inputs),
                flags.code,
                imports,
                run_on,
            )
            instances = self._starting.start(message, maker, None, progress.cancellation)
        else:
            jitted, instances, maker, sets = self._create(
                record, message, module, taken, progress, made_inputs, imports, flags, run_on, mixed, on_demand
            )
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
            is_ready_calls=is_ready_calls,
            sees_outputs=message.backend == "python",
            ordered=model_config.is_ordered(message),
            passive=tuple(instance for instance in instances if instance.passive),
            is_passive=not self._starting.groups(message).active,
            sequences=sequences,
            made_inputs=made_inputs,
            sets=sets,
            stepped=stepped,
            footprint=progress.footprint(),
            record=record,
            pure=jitted is not None and not sticky and not streams,
            # Instances of a model with sequences cannot be regrouped: they have the sequences' slots.
            maker=None if sticky else maker,
        )

    def _create(
        self,
        record: Load,
        message: ModelConfig,
        module: ModuleType,
        described: Signature,
        progress: LoadProgress,
        made_inputs: MadeInputs,
        imports: ModelImports,
        flags: OwnFlags,
        run_on: Sequence[int],
        mixed: SetDeclaration | None,
        on_demand: bool,
    ) -> tuple[JaxModel | None, tuple[Instance, ...], InstanceMaker, ParameterSets]:
        def started(
            host: Instantiated, sets: ParameterSets
        ) -> tuple[None, tuple[Instance, ...], InstanceMaker, ParameterSets]:
            prepared = prepared_samples(record, message, described, made_inputs)
            maker = InstanceMaker(lambda *_: lambda _: host, prepared, flags.code, imports, run_on)
            return None, self._starting.start(message, maker, None, progress.cancellation), maker, sets

        host = bool(getattr(module, "host", False))
        if host and described.states:
            raise Unsupported(
                f"model '{message.name}': state is for functions that are compiled; a host model keeps its own"
            )
        buckets = choose_buckets(message, module, program_signature(described) if described.free else described)
        groups = self._starting.groups(message)
        # An instance that waits for resources has a thread of its own, also where there is only one.
        threads = groups.active > 1 or groups.limited
        given, spread = given_devices(message, module, self._devices, self._gpu, bool(described.states))
        if mixed is not None and spread is not None:
            raise Unsupported(f"model '{message.name}': batch_sets is for models that run on one device")
        if on_demand and (spread is not None or mixed is not None):
            which = (
                "that run on one device" if mixed is None else "whose batches do not mix parameter sets (batch_sets)"
            )
            raise Unsupported(f"model '{message.name}': memory_policy 'on_demand' is for models {which}")
        turns = spread is not None or mixed is not None
        if turns and threads and not host:
            groups.take_turns(
                message.name, "a JAX model on several devices" if mixed is None else "a model with batch_sets"
            )
            threads = False
        count = groups.active if threads else 1
        if not host:
            limits = self._target.options.executables
            check_size(buckets, limits.max_batch_byte_size)
            check_state_size(buckets.signature, count, limits.max_state_byte_size)
        with precision(described), flags.code():
            returned = create(message.name, module, Path(record.version_path), model_config.to_dict(message), given)
        apply, parameters, first = created(module, described, returned, made_inputs.asked, mixed is not None)
        if is_generator(returned):
            if mixed is not None or on_demand:
                what = "batch_sets" if mixed is not None else "memory_policy 'on_demand'"
                raise Unsupported(f"model '{message.name}': {what} is for jitted functions, a generator is none")
            declare_streams(message)
            sets = host_sets(message.name, parameters, self._target.room)
            streaming = GeneratorModel(record.version, described, apply, sets, imports.port)
            return started(streaming, sets)
        if message.model_transaction_policy.decoupled:
            raise InvalidArgument(
                f"model '{message.name}' is decoupled: create() must return a generator function, which yields its responses"
            )
        if host:
            sets = host_sets(message.name, parameters, self._target.room)
            model = HostModel(record.version, described, apply, sets, imports.port)
            return started(model, sets)
        if flags.wide:
            described = dataclasses.replace(described, doubles=True)
            buckets = choose_buckets(message, module, program_signature(described) if described.free else described)
        warn_of_keys(message.name, parameters)
        warn_of_leaves(message.name, parameters)
        alone = message.HasField("sequence_batching") or bool(made_inputs)
        with self._compiling(progress):
            jitted = jitted_model(
                record,
                message,
                described,
                buckets,
                (flags.applied(apply), parameters, first),
                count,
                threads or alone,
                spread,
                self._target,
                mixed,
                on_demand,
            )
            jitted.executables.warm(progress)
            jitted.prepare_grouped(progress.cancellation)
            prepared = prepared_samples(record, message, described, made_inputs)
            own = self._own if spread is None else jitted.executables.device
            run_samples(jitted, prepared, own, message.name, self._check)
        maker = InstanceMaker(
            self._jitted_instances,
            prepared,
            flags.code,
            imports,
            run_on,
            alone or turns,
            turns,
        )
        instances = self._starting.start(message, maker, jitted, progress.cancellation) if threads else ()
        return jitted, instances, maker, jitted.sets

    def _jitted_instances(self, _: ModelConfig, jitted: JaxModel | None) -> Callable[[str], Instantiated]:
        assert jitted is not None
        return lambda _: JittedInstance(jitted, self._target.execution.beside())

    def regrouped(self, record: Load, former: LoadedModel, cancellation: Cancellation) -> LoadedModel | None:
        """Returns a serving version with another number of instances, if nothing else differs between two Load records.

        Instances that stay are not started again, and nothing is compiled.

        Args:
          record: the new Load record.
          former: the version that serves.
        Returns: None if more has changed, so that the version has to be loaded.
        Raises: ServingError: an instance could not be started.  Cancelled: the load was cancelled.
        """
        maker, known = former.maker, former.record
        if maker is None or known is None or not record.content or record.config == known.config:
            return None
        if record != msgspec.structs.replace(known, config=record.config):
            return None
        message = model_config.parse_json(former.config.decode(), record.name)
        groups = [self._completed(message, each, maker).instance_group for each in (known, record)]
        if list(message.instance_group) != list(groups[0]):
            return None  # the model itself has set its instance groups
        del message.instance_group[:]
        message.instance_group.extend(groups[1])
        # Tensors without dims were declared as single numbers when the version was loaded.
        scalars = [tensor.name for tensors in (message.input, message.output) for tensor in tensors if not tensor.dims]
        model_checks.check(message, whole=True, scalars=scalars)
        planned, jitted = self._starting.groups(message), former.jitted
        threads = not maker.takes_turns and (planned.active > 1 or planned.limited)
        if jitted is not None:
            jitted = jitted.for_instances(planned.active if threads else 1, threads or maker.alone)
        try:
            with self._kept(record):
                instances = (
                    self._starting.start(message, maker, jitted, cancellation, (*former.instances, *former.passive))
                    if threads or jitted is None
                    else ()
                )
        except BaseException as error:
            cancellation.check()
            if isinstance(error, (Internal, InvalidArgument, Unsupported)):
                raise without_frames(error) from None
            _log.error("more instances of model '%s' version %d failed", record.name, record.version, exc_info=error)
            self._check()
            folders = (Path(record.version_path), Path(record.model_path))
            raise without_frames(Internal(described_failure(error, folders))) from None
        return dataclasses.replace(
            former,
            config=model_config.to_json(message),
            jitted=jitted,
            instances=tuple(instance for instance in instances if not instance.passive),
            passive=tuple(instance for instance in instances if instance.passive),
            is_passive=not planned.active,
            record=record,
            taken_over=True,
        )

    @staticmethod
    def _completed(message: ModelConfig, record: Load, maker: InstanceMaker) -> ModelConfig:
        """Returns a copy of the configuration that has the instance groups of the Load record, completed with defaults.

        ``maker``: says which GPUs the model runs on.
        """
        given, made = model_config.from_bytes(record.config), model_config.empty(message.name)
        made.CopyFrom(message)
        del made.instance_group[:]
        made.instance_group.extend(given.instance_group)
        model_config.complete(made, maker.gpus)
        return made
