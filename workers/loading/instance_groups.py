"""What ``instance_group`` says of this worker: how many instances, which of them take requests, and what each needs to run."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tensord.config.model_config import ModelConfig
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.shm.status_page import StatusPage
from tensord.workers.models.instance import Instance, Instantiated
from tensord.workers.models.warmup import Sample
from tensord.workers.programs.run_errors import CheckDevice
from tensord.workers.threads.inbox import Inbox

_log = logging.getLogger(__name__)


Aside = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def compiling_alone(aside: Aside, lock: threading.Lock) -> Iterator[None]:
    """One model is compiled, and run for the first time, at a time; others are loaded meanwhile up to there."""
    with aside(), lock:
        yield


@dataclass(frozen=True, slots=True)
class Planned:
    """One instance."""

    name: str
    #: It is loaded, and never gets a request.
    passive: bool
    #: Resource of the rate limiter -> how much; empty: it runs whenever it is free.
    needs: Mapping[str, int]
    #: It has one turn where others have so many.
    priority: int


class InstanceGroups:
    """Of one completed configuration."""

    def __init__(
        self, message: ModelConfig, gpu: int | None, limits: Mapping[str, int] | None, devices: int = 1
    ) -> None:
        """
        Args:
          gpu: the number of the worker's first one, and ``devices`` how many it has.
          limits: the operator's, on this device; None: there is no rate limiter.
        Raises: InvalidArgument: an instance needs more than there is.
        """
        own = set() if gpu is None else {*range(gpu, gpu + devices)}
        groups = [
            group
            for group in message.instance_group
            if (group.kind != group.KIND_GPU if gpu is None else group.kind != group.KIND_CPU)
            and (not group.gpus or own & {*group.gpus})
        ]
        if gpu is not None and all(group.kind == group.KIND_CPU for group in message.instance_group):
            _log.warning(
                "model '%s': KIND_CPU is without effect: there are GPU workers only (workers.cpu_beside_gpus)",
                message.name,
            )
        #: Where it is loaded without being meant to, as anywhere else.
        groups = groups or list(message.instance_group)
        self.instances: list[Planned] = []
        for group in groups:
            needs: dict[str, int] = {}
            for resource in group.rate_limiter.resources if limits is not None else ():
                if resource.count:
                    needs[resource.name.lower()] = resource.count
            for name, count in needs.items():
                if limits is not None and count > limits.get(name, count):
                    raise InvalidArgument(
                        f'Resource count for "{name}" is limited to {limits[name]} which will prevent scheduling of one or more '
                        f"model instances, the minimum required count is {count}"
                    )
            priority = group.rate_limiter.priority
            self.instances += [
                Planned(f"{group.name}_{index}", group.passive, needs, priority) for index in range(group.count)
            ]

    @property
    def active(self) -> int:
        """How many take requests."""
        return sum(not planned.passive for planned in self.instances)

    @property
    def limited(self) -> bool:
        """Whether any of them needs something."""
        return any(planned.needs for planned in self.instances)

    def take_turns(self, model: str) -> None:
        """Several devices have one program. Raises Unsupported: they would have to wait for more."""
        if self.limited:
            raise Unsupported(
                f"model '{model}': a JAX model on several devices cannot wait for resources of the rate limiter"
            )
        _log.info("model '%s': its %d instances take turns", model, self.active)

    def __iter__(self) -> Iterator[Planned]:
        return iter(self.instances)

    def __len__(self) -> int:
        return len(self.instances)


@dataclass(frozen=True, slots=True)
class Starting:
    """How a worker starts instances. ``gpu``, ``limits`` and ``devices`` are as in ``InstanceGroups``."""

    gpu: int | None
    limits: Mapping[str, int] | None
    devices: int
    inbox: Inbox
    page: StatusPage
    check: CheckDevice
    #: The loader's thread is in it while it only waits.
    aside: Aside

    def groups(self, message: ModelConfig) -> InstanceGroups:
        """Raises InvalidArgument: an instance needs more than there is."""
        return InstanceGroups(message, self.gpu, self.limits, self.devices)

    def start(
        self,
        message: ModelConfig,
        create: Callable[[str], Instantiated],
        prepared: Sequence[Sample],
        code: Callable[[], AbstractContextManager[None]],
    ) -> tuple[Instance, ...]:
        """A thread for each configured instance, all initialised at the same time, and warm.

        Raises what one of them raises, and ends the others.

        Args:
          prepared: what each runs before it counts as started.
          code: as of ``Instance``.
        """

        def warm(model: Instantiated) -> None:
            for sample in prepared:
                sample.run(model, message.name, self.check)

        made: list[Instance] = []
        for planned in self.groups(message):
            instance = Instance(
                planned.name, functools.partial(create, planned.name), self.inbox, self.page, warm, self.check, code
            )
            instance.passive, instance.needs, instance.priority = planned.passive, planned.needs, planned.priority
            made.append(instance)
        for instance in made:
            instance.start()
        failures: list[BaseException] = []
        with self.aside():
            for instance in made:
                try:
                    instance.wait_started()
                except BaseException as error:
                    failures.append(error)
        if failures:
            # Those that failed have ended.
            for instance in made:
                instance.close(lambda: None)
            raise failures[0]
        return tuple(made)
