"""Loads and unloads models: at the daemon's start, when a client asks, and when the options or the repositories change.

``tensord.daemon.models.lifecycle`` decides which worker loads which model. This module carries out these decisions.
If a client sends files with a load, the model is served from these files until the model's next load or unload.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensord.config.options import Options, Repository
from tensord.daemon.control import open_files
from tensord.daemon.models import ensembles, placement, readiness, repository
from tensord.daemon.models.ensembles import Coming, Ensembles
from tensord.daemon.models.given import GivenModels, Overrides
from tensord.daemon.models.lifecycle import (
    UNLOADED,
    Forget,
    Instruction,
    Lifecycle,
    Outdate,
    Publish,
    Retry,
    Send,
    Settled,
)
from tensord.daemon.models.readiness import ReadinessCheck, ServedBefore, Standing
from tensord.daemon.models.repository import FoundModel, Repositories
from tensord.daemon.models.versions import named
from tensord.shm.common.derivatives import check_not_derivative
from tensord.shm.control_records import Loaded, Loading, ModelGone, ModelState, Readiness
from tensord.shm.errors import Internal, InvalidArgument, ServingError, Unavailable, Unsupported
from tensord.shm.operations import NOT_EXPLICIT, LoadModel

if TYPE_CHECKING:
    from tensord.daemon.supervisor import Supervisor


_log = logging.getLogger(__name__)


class Models:
    """Has workers load and unload models, as clients and options ask. ``Lifecycle`` decides which worker loads what."""

    def __init__(
        self, options: Options, supervisor: Supervisor, kept: Path | None = None, place: Path | None = None
    ) -> None:
        """Stores the options. No model is known yet.

        Args:
          kept: the folder for a list of the served models, which the daemon reads after a crash. If it is None, there is no list.
          place: the folder for model files that clients send. If it is None, $TMPDIR is used.
        """
        self._supervisor = supervisor
        self._placing = options
        self._options = options.repository
        self._worker_wait = options.requests.worker_wait
        publish = supervisor.model_changed
        self.lifecycle = Lifecycle()
        self._readiness = ReadinessCheck(self.standings, publish)
        self._before = ServedBefore(kept)
        #: Names of models that should be served: in the repositories, or asked for by name and not unloaded since.
        self._wanted: set[str] = set()
        #: Names of models that could not even be tried when they were asked for last, with what fronts were told of each.
        self._refused: dict[str, ModelState] = {}
        #: The new ones among them that could not be read for want of file descriptors, and are read again.
        self._unread: set[str] = set()
        self._repositories = Repositories()
        #: Scans the folders that options name, as ``Repositories.scan`` does.
        self.scan = self._repositories.scan
        #: The timers of versions that were given up and are to be loaded again, by name and number.
        self._retries: dict[tuple[str, int], asyncio.TimerHandle] = {}
        self.ensembles = Ensembles(self.lifecycle.models)
        self._coming = Coming(self.lifecycle.models, publish)
        #: Names that a client or the options asked for, and not only an ensemble.
        self._named: set[str] = set()
        #: Tasks that load ensembles again because a member was replaced or has come back.
        self._again: dict[str, asyncio.Task[None]] = {}
        #: The last task of each name that was started by a look at the repositories.
        self._latest: dict[str, asyncio.Task[str]] = {}
        #: The value of ``repository.load`` that was last acted upon.
        self._listed: set[str] = set()
        self._outcomes = Outcomes()
        self._overrides = Overrides()
        self._given = GivenModels(place)
        #: Is set, and replaced, when anything about the models may have changed.
        self._changed = asyncio.Event()

    # --------------------------------------------------------------------------------------------- clients' operations

    async def load(self, request: LoadModel) -> None:
        """Loads or reloads the model that ``request`` names, and waits until the load has ended.

        Also waits for the loads of ensembles that use the model. Raises Unavailable if the option ``repository.control_mode``
        is not "explicit", if the files in ``request`` cannot be stored, or if this process may open no more files. Raises
        Internal if no repository holds a valid model of this name. Raises InvalidArgument if the load failed, or if the name,
        configuration or files are invalid. Raises Unsupported if the model asks for a feature that tensord lacks.
        """
        self._only_explicit(request.name)
        self._named.add(request.name)
        try:
            if request.files:
                await self._load_given(request.name, request.files, request.config)
            else:
                await self._load_found(request.name, request.config)
            await self._followed(request.name)
        finally:
            self._given.drop_unused(request.name, self.lifecycle.folders(request.name))

    async def _load_found(self, name: str, config: str) -> None:
        # Without ``config``, the one that a client sent with an earlier load of the same files applies, else config.pbtxt.
        found = await asyncio.to_thread(repository.find, self._paths(), name)
        given = config or self._overrides.of(found)
        loaded = found
        if given and found.path.name:
            loaded = await asyncio.to_thread(repository.overridden, found.path, given)
        elif found.error:
            _log.error("model '%s' cannot be polled: %s%s", name, found.error, self._still_served(name))
            if name in self.lifecycle.known | self._wanted:
                self._note_refused(name, found.error)
            if found.unsupported:
                raise Unsupported(repository.given_error(name, found.error))
            raise Internal(repository.poll_error([name]))
        if error := await self._bring(loaded, asked=True):
            raise InvalidArgument(error)
        self._overrides.keep(found, given)

    async def _load_given(self, name: str, files: Mapping[str, bytes], config: str) -> None:
        """Loads a model from files and a JSON configuration of a client. ``files``: path in the model's folder -> content."""
        if not config:
            raise InvalidArgument(repository.given_error(name, "files are given without a 'config'"))
        if not repository.NAME.fullmatch(name):
            raise InvalidArgument(repository.given_error(name, "no model can have that name"))
        async with self._given.coming(name, files) as folder:
            found = await asyncio.to_thread(repository.overridden, folder, config)
            if failure := await self._bring(found, asked=True):
                raise InvalidArgument(failure)
        self._overrides.drop(name)

    def unload(self, name: str, dependents: bool = False) -> None:
        """Begins to unload a model, as a client asked. If no model has that name, nothing is unloaded.

        Ensembles that use the model are unloaded before it, and are loaded again when the model is loaded again.
        ``dependents``: whether to unload also the models that only the ensemble ``name`` uses. Such a model stays loaded if a
        client or an option asked for it by name. Raises Unavailable if the option ``repository.control_mode`` is not "explicit".
        Raises InvalidArgument if ``name`` is the name of a derived model, such as ``M.pull_back``.
        """
        self._only_explicit(name)
        gone = [name, *(self.ensembles.only_used_by(name, self._named - {name}) if dependents else ())]
        users = self.ensembles.take_down(self.ensembles.users(name))
        for each in gone:
            self.ensembles.drop(each)
            self._named.discard(each)
            self._overrides.drop(each)
            self._dismiss(each)
        self._take_down(users, *gone)

    def _take_down(self, users: Sequence[str], *more: str) -> None:
        if users:
            _log.warning("a model is gone, and with it the ensembles that use it: %s", ", ".join(users))
        out: list[Instruction] = []
        for name in (*users, *more):
            if name in more or name not in self._coming.names:  # what goes with a model is brought with it, too
                self._wanted.discard(name)
            token, gone = self._outcomes.expect()
            gone.add_done_callback(functools.partial(self._gone, name))
            out += self.lifecycle.unload(name, token, self.ensembles.awaits(self.ensembles.members(name)))
        if out:
            self._begin(out)

    def _gone(self, name: str, _: object) -> None:
        self._given.drop_unused(name, self.lifecycle.folders(name))

    def forget_served(self) -> None:
        """Deletes served.json. A daemon that starts after a crash reads from that file which models had been served."""
        self._before.forget()

    def close(self) -> None:
        """Cancels all planned retries of loads and removes files that clients sent. Call it only when no worker runs."""
        for timer in self._retries.values():
            timer.cancel()
        self._given.close()

    async def index(self, ready: bool, detailed: bool = False) -> list[dict[str, str | int]]:
        """Reads the repositories. Returns Triton's repository index: an entry (name, version, state, reason) for each version.

        ``ready``: whether only versions that serve are listed. ``detailed``: whether an entry also has the number of XLA
        programs, the bytes of parameters and programs, and the bytes of inputs, outputs and temporaries of the largest program.
        """
        folders = Counter(folder.name for folder in await asyncio.to_thread(repository.readable_folders, self._paths()))
        self.lifecycle.known = set(folders)
        refused = {name: told.reason for name, told in self._refused.items() if name in folders or name in self._wanted}
        refused |= {name: taken for name in folders if (taken := repository.taken_name(name))}
        refused |= {name: repository.DUPLICATE for name, count in folders.items() if count > 1}
        now = asyncio.get_running_loop().time()
        waits = {key: max(0.0, timer.when() - now) for key, timer in self._retries.items()}
        return self.lifecycle.index(refused, waits, ready, detailed)

    def _only_explicit(self, name: str) -> None:
        check_not_derivative(name)
        if self._options.control_mode != "explicit":
            raise Unavailable(NOT_EXPLICIT)

    # ------------------------------------------------------------------------------------------------ start and reload

    def begin(self, found: Mapping[str, FoundModel], options: Repository) -> list[asyncio.Future[str]]:
        """Begins to load the models in ``found``, and to unload models that are not in ``found``.

        If ``options.control_mode`` is "explicit", loads only models that ``options.load`` names ("*": all), and unloads none.
        ``found``: the models in the repositories, by name. Returns a future for each load. Its result is why the load failed,
        or "" if the load succeeded.
        """
        self._options = options
        self.lifecycle.known = set(found)
        if options.control_mode != "explicit":
            wanted: Iterable[str] = found
            self._wanted = set(found)
            self._unload({*self.lifecycle.models, *self.ensembles.names} - found.keys())
        elif "*" in options.load:
            # Files that a client gave replace those of the repository.
            wanted = [name for name in found if not self._given.serves(name, self.lifecycle.folders(name))]
        else:
            # Explicit models that clients loaded stay as they are; names that are new in the list, or are not served, are loaded.
            served = self.lifecycle.ready_models()
            again = self._wanted - served.keys()
            wanted = [name for name in dict.fromkeys(options.load) if name not in self._listed or name in again]
        self._listed = set(options.load)
        self._named.update(wanted)
        self._forget(found)
        self._wanted.update(wanted)
        # After a crash what had not served before it does not count.
        first = self._wanted & self._before.names or self._wanted
        self._readiness.begin({*first, *self._repositories.unreadable}, options.required)
        self._check_readiness()
        return [self._bring_wanted(name, found.get(name)) for name in wanted]

    async def follow(self, found: Mapping[str, FoundModel], changed: Sequence[FoundModel], gone: Sequence[str]) -> None:
        """Loads models whose folders have changed, unloads models that are gone, and waits for the loads.

        Args:
          found: all models that the repositories hold now, by name.
          changed: the models to load.
          gone: the names of the models to unload.
        """
        self.lifecycle.known = set(found)
        self._wanted.difference_update(gone)
        self._unload(gone)
        self._forget(found)
        self._wanted.update(model.name for model in changed)
        self._check_readiness()
        await asyncio.gather(*[self._bring_wanted(model.name, model) for model in changed])

    def _unload(self, gone: Iterable[str]) -> None:
        for name in gone:
            self.ensembles.drop(name)
            self._begin(self.lifecycle.unload(name, self._outcomes.token()))

    def _forget(self, found: Mapping[str, FoundModel]) -> None:
        for name in list(self.lifecycle.models):
            self._begin(self.lifecycle.forget(name, found[name].versions if name in found else ()))
        self._wanted &= self.lifecycle.models.keys() | found.keys() | self._listed | self._coming.names
        for name in self._refused.keys() - self._wanted - found.keys():
            self._dismiss(name)

    def _bring_wanted(self, name: str, found: FoundModel | None) -> asyncio.Task[str]:
        task = self._latest[name] = asyncio.get_running_loop().create_task(self._bring_found(name, found))
        task.add_done_callback(functools.partial(_drop_if_same, self._latest, name))
        return task

    async def _bring_found(self, name: str, found: FoundModel | None) -> str:
        if found is not None and found.lacking and name not in self.lifecycle.models:
            # Requests are told that it cannot be served now, until a version of it is known: not that there is no such model.
            self._unread.add(name)
            self._tell_refused(name, f"the model {found.error}")
        if found is None or found.lacking:  # the last look at the repositories found none, or could not read it
            found = await self._read(name, repository.find, self._paths(), name)
        reason = f"model '{name}' cannot be polled: {found.error}"
        if given := self._overrides.of(found):
            try:
                found = await self._read(name, repository.overridden, found.path, given)
            except ServingError as error:
                found, reason = FoundModel(name, found.path, error=error.message), error.message
        else:
            self._overrides.drop(name)
        if name not in self._wanted:
            return UNLOADED
        if found.error:
            self._refuse(name, found.error)
            return reason
        return await self._bring(found)

    @staticmethod
    async def _read(name: str, read: Callable[..., FoundModel], *words: Any) -> FoundModel:
        # Reads a model for the load of ``name``, later if no more files can be opened now.
        return await open_files.awaited(
            functools.partial(asyncio.to_thread, read, *words),
            functools.partial(_log.error, "model '%s' is loaded later: %s", name),
        )

    async def _bring(
        self, found: FoundModel, within: tuple[str, ...] = (), again: bool = False, asked: bool = False
    ) -> str:
        # Returns the reason why the load failed, or "". ``within``: the ensembles for which the model is loaded, outermost first.
        # ``again``: a member of the ensemble has changed. ``asked``: the model was named, so unchanged files are loaded as well.
        self._wanted.add(found.name)
        if not found.chosen:
            self._refuse(found.name, found.problem)
            return repository.no_version_error(found.name)
        try:
            if found.members:
                with self._coming.published(found):
                    placed = await self._with_members(found, within, again)
                    if found.name not in self._wanted:
                        raise InvalidArgument(UNLOADED)
            else:
                placed = repository.placed(found, self._supervisor.workers.devices, self._placing)
                workers = self._placing.workers
                repository.check_isolated(placed, self.lifecycle.isolated(workers), workers)
                if placed.resources:
                    placement.check_resources(placed.name, placed.resources, self.lifecycle.resources())
        except InvalidArgument as error:
            if found.name in self._wanted:
                self.ensembles.expect(found)
                self._refuse(found.name, error.message)
            self._tell()
            return repository.placement_error(found.name, error.message)
        latest = self._latest.get(found.name)
        if not (within or again or asked) and latest not in (None, asyncio.current_task()):
            # This load waited for members, and was overtaken by a later look at the repositories.
            return await asyncio.shield(latest)
        known = self.lifecycle.models.get(found.name)
        if known is None or known.fingerprint != placed.fingerprint:
            for sentence in found.without_effect:
                _log.warning("model '%s': %s", found.name, sentence)
        if asked and self.lifecycle.unchanged(placed):
            _log.info("model '%s': its files are those that it was loaded from; it is loaded again", found.name)
        token, outcome = self._outcomes.expect(found.name)
        if found.members:
            self.ensembles.add(found)
        else:
            self.ensembles.drop(found.name)
        self._begin(self.lifecycle.load(placed, token, asked))
        self._dismiss(found.name)
        self._check_readiness()
        return await outcome

    async def _with_members(self, found: FoundModel, within: tuple[str, ...], again: bool) -> FoundModel:
        if again:  # because a member changed: then members are only checked
            return self.ensembles.check(found, self._supervisor.workers.devices)
        name, within = found.name, (*within, found.name)
        polled: dict[str, FoundModel] = {}
        for member, _ in found.members:
            if member in within or self.ensembles.circle(name, member):
                raise InvalidArgument(f"circular dependency between ensembles: {member} -> ... -> {name} -> {member}")
            if not self.lifecycle.is_ready(member):
                polled[member] = await self._read(name, repository.find, self._paths(), member)
        ensembles.check_found(name, polled)
        reasons: dict[str, str] = {}
        for member, one in polled.items():
            coming = self._outcomes.coming(member)
            with self.ensembles.waits.waiting(name, member):
                failed = await (self._bring(one, within) if coming is None else asyncio.shield(coming))
            reasons[member] = failed.removeprefix(f"load failed for model '{member}': ").strip()
            if reasons[member].startswith("circular dependency"):
                raise InvalidArgument(reasons[member])
        return self.ensembles.check(found, self._supervisor.workers.devices, reasons)

    def _settle_ensembles(self) -> None:
        """Begins to unload the ensembles of which a model is missing, and to load those whose models all serve again."""
        self._take_down(self.ensembles.lost())
        for found in self.ensembles.returned():
            task = self._again[found.name] = asyncio.get_running_loop().create_task(self._bring_again(found))
            task.add_done_callback(functools.partial(_drop_if_same, self._again, found.name))
        for name, told in list(self._refused.items()):  # a model for which one waited may not come any more
            self._tell_refused(name, told.reason)

    async def _bring_again(self, found: FoundModel) -> None:
        error = await self._bring(found, again=True)
        # One of which workers died while they loaded it is tried again, as any model is.
        if error and not any(
            version.awaited and version.deaths for version in named(self.lifecycle.models, found.name, -1)
        ):
            _log.error("ensemble '%s' is not served any more: %s", found.name, error.strip())
            self._take_down((), found.name)
            self.ensembles.failed(found)
            self._wanted.add(found.name)

    async def _followed(self, name: str) -> None:
        while True:
            users = self.ensembles.followers(name)
            coming = [each for user in users for each in (self._again.get(user), self._outcomes.coming(user)) if each]
            if not (unfinished := [each for each in coming if not each.done()]):
                return
            await asyncio.wait(unfinished)

    def _refuse(self, name: str, reason: str) -> None:
        _log.error("model '%s' cannot be loaded: %s%s", name, reason, self._still_served(name) or "; it is not served")
        self._note_refused(name, reason)

    def _still_served(self, name: str) -> str:
        """Returns the end of a log line that says which versions of the model are still served, or "" if none is."""
        served = [str(version.load.version) for version in named(self.lifecycle.models, name, -1) if version.ready]
        return f"; version {' and '.join(served)} is still served" if served else ""

    def _note_refused(self, name: str, reason: str) -> None:
        self._unread.discard(name)
        self._tell_refused(name, reason)
        self._check_readiness()

    def _tell_refused(self, name: str, reason: str) -> None:
        awaited = name in self._unread or bool(self.ensembles.awaits(self.ensembles.members(name)))
        state = ModelState(name, 0, "UNAVAILABLE", reason, awaited=awaited)
        if state != self._refused.get(name):
            self._refused[name] = state
            self._supervisor.model_changed(state)

    def _dismiss(self, name: str) -> None:
        self._unread.discard(name)
        if self._refused.pop(name, None) is not None:
            self._supervisor.model_changed(ModelGone(name, 0))

    # ------------------------------------------------------------------------------------------------------- readiness

    def standings(self) -> list[Standing]:
        """Returns the readiness of each model that should be served, and of each unreadable repository, sorted by name."""
        unreadable = self._repositories.unreadable
        wanted = {*self._wanted, *unreadable}
        refused = {name: told.reason for name, told in self._refused.items() if name not in self._unread} | unreadable
        return readiness.standings(wanted, self._options.required, refused, self.lifecycle)

    def drain(self, draining: bool) -> None:
        """Notes whether the daemon is draining, in which case it is not ready."""
        self._readiness.draining = draining
        self._check_readiness()

    def outdated(self, why: str) -> None:
        """Stores why the daemon cannot start processes in place of dead ones. ``why``: the reason, or "" if it can start them."""
        self._readiness.outdated = why
        self._check_readiness()

    def _check_readiness(self) -> None:
        self._readiness.check(self._options.strict_readiness)
        if self.readiness.ready:
            self._before.note(self._readiness.served)

    @property
    def readiness(self) -> Readiness:
        """Returns the readiness of the daemon as it was last sent to the fronts."""
        return self._readiness.readiness

    # ----------------------------------------------------------------------------------------------- workers and fronts

    def worker_joined(self, incarnation: int, device: str) -> None:
        """Sends a new worker the loads of the models for its device. ``incarnation``: the number of the worker process."""
        self._begin(self.lifecycle.worker_joined(incarnation, device))

    def worker_left(self, incarnation: int, how: str, usable: Sequence[str]) -> None:
        """Tells the fronts that a worker has ended. The worker's replacement will load the same models.

        A model version is given up instead if too many workers have died while loading it, or if it is not served any more
        and none of its devices is in ``usable``.
        Args:
          incarnation: the number of the worker process.
          how: how the process ended, such as "was killed by SIGSEGV".
          usable: the devices that workers can still use.
        """
        self._readiness.loads(incarnation, None)
        left = self.lifecycle.worker_left(incarnation, how)
        self._begin([*left, *self.lifecycle.stranded(usable, self._readiness.outdated)])

    def worker_dismissed(self, incarnation: int) -> None:
        """Notes that a worker is stopped on purpose, so that it serves nothing any more.

        Unlike a crash, such a stop does not count against the models that the worker is loading.
        ``incarnation``: the number of the worker process.
        """
        self._begin(self.lifecycle.worker_left(incarnation, dismissed=True))

    def fill(self, name: str, number: int) -> None:
        """Loads a version on the workers that should have it and do not. Call it after a push of the version's parameters."""
        self._begin(self.lifecycle.fill(name, number))

    def loading(self, incarnation: int, at: Loading) -> None:
        """Stores ``at``, which says how far a worker is with a load. The readiness that the fronts report shows this.

        ``incarnation``: the number of the worker process.
        """
        self._readiness.loads(incarnation, at)
        self._check_readiness()

    def loaded(self, incarnation: int, answer: Loaded) -> None:
        """Logs a worker's answer to a load. If the version is served now, tells the fronts so.

        ``incarnation``: the number of the worker process.
        """
        self._readiness.loads(incarnation, None)
        if answer.cancelled:
            _log.info("the load of model '%s' version %d was given up: %s", answer.name, answer.version, answer.reason)
        elif answer.reason:
            still = self._still_served(answer.name)
            _log.error("model '%s' version %d failed to load: %s%s", answer.name, answer.version, answer.reason, still)
        else:
            _log.info("model '%s' version %d is loaded", answer.name, answer.version)
        self._begin(self.lifecycle.loaded(incarnation, answer))

    async def sent(self, incarnation: int, name: str, version: int) -> None:
        """Waits, as a request does, until a worker was sent the load of a model version, if it gets that after others.

        Version 0 means any. The load of an ensemble may still wait for the loads of its models.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._worker_wait):
                while self.lifecycle.is_postponed(incarnation, name, version) or name in self._coming.names:
                    await self._changed.wait()

    def unloaded(self, incarnation: int, name: str, version: int) -> None:
        """Logs that a worker unloaded a version, and begins loads that waited for it. ``incarnation``: the worker's number."""
        _log.info("model '%s' version %d is unloaded", name, version)
        self._begin(self.lifecycle.unloaded(incarnation, name, version))

    def states(self) -> list[ModelState | Readiness]:
        """Returns the records that tell a new front process the state of every model and the daemon's readiness."""
        return [*self.lifecycle.states(), *self._coming.states(), *self._refused.values(), self.readiness]

    def _begin(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(worker, record):
                    self._supervisor.workers.by_incarnation[worker].send(record)
                case Publish(state):
                    self._supervisor.model_changed(state)
                case Forget(name, version, outdated):
                    self._supervisor.parameters.forget(name, version, outdated)
                case Outdate(name, version):
                    self._supervisor.parameters.outdate(name, version)
                case Retry():
                    self._retry_later(instruction)
                case Settled(token, error):
                    self._outcomes.settle(token, error)
        self._supervisor.isolate(self.lifecycle.isolated(self._placing.workers))
        self._settle_ensembles()
        self._check_readiness()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _retry_later(self, retry: Retry) -> None:
        """Starts a timer that loads the model version in ``retry`` again. Cancels an earlier timer of this version."""
        key = (retry.name, retry.version)
        if (former := self._retries.pop(key, None)) is not None:
            former.cancel()
        self._retries[key] = asyncio.get_running_loop().call_later(retry.seconds, self._retry, retry)
        said = "model '%s' version %d is given up for now: %s; it is tried again in %g s"
        _log.error(said, *key, self.lifecycle.reason(*key), retry.seconds)

    def _retry(self, retry: Retry) -> None:
        del self._retries[retry.name, retry.version]
        if self.lifecycle.reason(retry.name, retry.version):
            _log.info("model '%s' version %d is tried again", retry.name, retry.version)
        self._begin(self.lifecycle.retry(retry.name, retry.version, retry.deaths))

    def _paths(self) -> list[Path]:
        return [Path(path) for path in self._options.paths]


def _drop_if_same(tasks: dict[str, asyncio.Task[Any]], name: str, task: asyncio.Task[Any]) -> None:
    if tasks.get(name) is task:
        del tasks[name]


class Outcomes:
    """Holds a future for each load and unload that runs. A future's result is why the operation failed, or "" for success."""

    def __init__(self) -> None:
        #: Makes a number for an operation, never given twice.
        self.token = itertools.count(1).__next__
        self._waiting: dict[int, asyncio.Future[str]] = {}
        #: The outcome of each model's last load, by name.
        self._loads: dict[str, asyncio.Future[str]] = {}

    def expect(self, load: str = "") -> tuple[int, asyncio.Future[str]]:
        """Creates a future for a load or unload that begins. Returns a token for ``settle``, and the future.

        The future's result will be the error text, or "" if the operation succeeds.
        ``load``: the name of the model that is loaded, or "" if a model is unloaded.
        """
        token = self.token()
        outcome = self._waiting[token] = asyncio.get_running_loop().create_future()
        if load:
            self._loads[load] = outcome
        return token, outcome

    def coming(self, name: str) -> asyncio.Future[str] | None:
        """Returns the future of a model's running load, or None if none runs. The future's result is an error text or ""."""
        outcome = self._loads.get(name)
        return None if outcome is None or outcome.done() else outcome

    def settle(self, token: int, error: str) -> None:
        """Sets the result of the future that ``expect`` returned with ``token``. ``error``: why the operation failed, or ""."""
        outcome = self._waiting.pop(token, None)
        if outcome is not None and not outcome.done():
            outcome.set_result(error)

    def __repr__(self) -> str:
        return f"<Outcomes {len(self._waiting)} to come>"
