"""Plans and starts the instances of a model in a worker, according to ``instance_group`` in the model's configuration."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.shm.status_page import StatusPage
from tensord.workers.imports.model_imports import ModelImports
from tensord.workers.models.instance import Instance, Instantiated, Planned
from tensord.workers.models.jax_model import JaxModel
from tensord.workers.models.loaded_model import InstanceMaker
from tensord.workers.programs.run_errors import CheckDevice
from tensord.workers.threads.cancellation import Cancellation
from tensord.workers.threads.inbox import Inbox

_log = logging.getLogger(__name__)


Aside = Callable[[], AbstractContextManager[None]]


class InstanceGroups:
    """The instances of one model that this worker runs, according to ``instance_group`` in the model's configuration."""

    def __init__(
        self, config: ModelConfig, gpu: int | None, limits: Mapping[str, int] | None, devices: int = 1
    ) -> None:
        """Plans the instances. Raises InvalidArgument: an instance needs more than a limit.

        ``gpu``: the number of the worker's first GPU; None: the worker runs on a processor. ``devices``: how many GPUs it has.
        ``limits``: resource -> the most that an instance may need; None: there are no limits.
        """
        own = set() if gpu is None else {*range(gpu, gpu + devices)}
        groups = [
            group
            for group in config.instance_group
            if (group.kind != group.KIND_GPU if gpu is None else group.kind != group.KIND_CPU)
            and (not group.gpus or own & {*group.gpus})
        ]
        if gpu is not None and all(group.kind == group.KIND_CPU for group in config.instance_group):
            _log.warning(
                "model '%s': KIND_CPU is without effect: there are GPU workers only (workers.cpu_beside_gpus)",
                config.name,
            )
        # A model that is loaded here although no group names this device has all groups.
        groups = groups or list(config.instance_group)
        self.instances: list[Planned] = []
        for row, group in enumerate(groups):
            resources = () if limits is None else group.rate_limiter.resources
            needs = {resource.name.lower(): resource.count for resource in resources if resource.count}
            for name, count in needs.items():
                if limits is not None and count > limits.get(name, count):
                    raise InvalidArgument(
                        f'Resource count for "{name}" is limited to {limits[name]} which will prevent scheduling of one or more '
                        f"model instances, the minimum required count is {count}"
                    )
            priority = group.rate_limiter.priority
            self.instances += [
                Planned(f"{group.name}_{index}", (row, index), group.passive, needs, priority)
                for index in range(group.count)
            ]

    @property
    def active(self) -> int:
        """The number of instances that take requests."""
        return sum(not planned.passive for planned in self.instances)

    @property
    def need_threads(self) -> bool:
        """True if each instance needs its own thread, because several instances run or an instance needs limited resources."""
        return self.active > 1 or any(planned.needs for planned in self.instances)

    def take_turns(self, model: str, kind: str) -> None:
        """Logs that the model's instances run one at a time. The caller has to make them do so.

        Raises Unsupported if an instance needs resources of the rate limiter. ``kind`` describes the model in the error's text.
        """
        if any(planned.needs for planned in self.instances):
            raise Unsupported(f"model '{model}': {kind} cannot wait for resources of the rate limiter")
        _log.info("model '%s': its %d instances take turns", model, self.active)


@dataclass(frozen=True, slots=True)
class Starting:
    """The settings with which a worker starts instances of its models. Each instance runs requests in a thread of its own."""

    #: The number of the worker's first GPU; None: the worker runs on the processor.
    gpu: int | None
    #: Resource -> how much of it the operator allows on this device; None: there is no rate limiter.
    limits: Mapping[str, int] | None
    #: How many devices the worker has.
    devices: int
    inbox: Inbox
    page: StatusPage
    check: CheckDevice
    #: Makes a context that the loader's thread enters while it only waits.
    aside: Aside

    def groups(self, config: ModelConfig) -> InstanceGroups:
        """Returns a model's instances to start. Raises InvalidArgument: an instance needs more of a resource than there is."""
        return InstanceGroups(config, self.gpu, self.limits, self.devices)

    def start(
        self,
        config: ModelConfig,
        maker: InstanceMaker,
        jitted: JaxModel | None,
        cancellation: Cancellation,
        started: list[Instance],
        former: Sequence[Instance] = (),
    ) -> tuple[Instance, ...]:
        """Starts a model's configured instances, each in a thread, and waits until they are initialised and warmed up.

        Returns all instances of the model. If an instance fails, its error is raised unchanged.
        Args:
          maker: makes the instances.
          jitted: the compiled model that the instances run. It is None if the model is not compiled.
          started: gets each instance that was started. If this method raises an error, the caller must end these instances.
          former: instances of the replaced version. An instance with unchanged settings is returned, and not started again.
        Raises Cancelled if ``cancellation`` is cancelled.
        """
        cancellation.check()
        create = maker.create(config, jitted)

        def warm(model: Instantiated) -> None:
            for sample in maker.prepared:
                sample.run(model, config.name, self.check)

        known = {instance.planned.place: instance for instance in former}
        all_of_them: list[Instance] = []
        made: list[Instance] = []
        for planned in self.groups(config).instances:
            instance = known.get(planned.place)
            if instance is None or instance.planned != planned:
                one = functools.partial(create, planned.name)
                instance = Instance(planned, one, self.inbox, self.page, warm, self.check, maker.code)
                made.append(instance)
            all_of_them.append(instance)
        failures: list[BaseException] = []
        for together in [[instance] for instance in made] if maker.one_by_one else [made]:
            if failures:
                break
            # Not beside other loads: what the thread finds of the process must be what it leaves there.
            for instance in together:
                instance.start()
                started.append(instance)
            with self.aside():
                for instance in together:
                    try:
                        instance.wait_started(cancellation)
                    except BaseException as error:
                        failures.append(error)
        if failures:
            raise failures[0]
        return tuple(all_of_them)


def end(started: Sequence[Instance], imports: ModelImports) -> None:
    """Ends the instances of a load that failed. The model's modules (``imports``) stay until the last instance has ended."""
    for instance in started:
        if not instance.failed:
            imports.hold()
            instance.close(imports.release)
