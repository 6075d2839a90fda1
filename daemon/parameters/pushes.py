"""Pushes new parameters to every worker of a model version, and sends the pushed values to workers that start later.

    push      1. The push gets its number, and waits until no other change of the model's parameters runs.
              2. MakeParameters: a worker copies the values to sealed memory, unless the client sent sealed memory.
              3. StageParameters: every worker gets the values, but does not use them yet.
              4. The supervisor stores the push, for workers that start later.
              5. CommitParameters: every worker uses the values. Then the client gets the answer.
              If step 2 or 3 fails, the workers keep their old values. If step 3 fails, they get AbortParameters.
    load      1. Load: the worker loads the version, but does not serve it yet, and answers Loaded.
              2. The load waits until no change of the model's parameters runs.
              3. The worker gets the stored values, if there are any, by StageParameters and CommitParameters.
              4. ServeLoaded: the worker serves the version. Then the fronts are told so.

So a worker that serves a version has every push that a client got an answer to, also for calls of models in this worker, which
need no front. A push fails if another push into the same set has the same number or a higher number. A version that is loaded
again from its files has the parameters of these files.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensord.config.options import Options
from tensord.daemon.control import open_files
from tensord.daemon.models.versions import IndexState, VersionEntry, check_given_up
from tensord.daemon.parameters import push_checks
from tensord.daemon.parameters.pushed_sets import Content, PushedSet, PushedSets, VersionKey
from tensord.daemon.parameters.turn import Turn
from tensord.shm import descriptors
from tensord.shm.common.derivatives import check_not_derivative
from tensord.shm.control_records import Loaded, Unload
from tensord.shm.errors import UNKNOWN_MODEL, Internal, InvalidArgument, NotFound, Replaced, ServingError, Unavailable
from tensord.shm.operations import (
    MAIN_SET,
    AbortParameters,
    CommitParameters,
    DropParameters,
    FileSource,
    ListParameters,
    MakeParameters,
    Operation,
    Peer,
    PushParameters,
    RevertParameters,
    ServeLoaded,
    Settle,
    StageParameters,
)

if TYPE_CHECKING:
    from tensord.daemon.models.changes import Models
    from tensord.daemon.processes.child import WorkerProcess
    from tensord.daemon.supervisor import Supervisor

_log = logging.getLogger(__name__)
_MAX_NUMBER = (1 << 63) - 1
#: The most changes of parameters that wait for their turn; each may hold memory of its own.
_MAX_WAITING = 64
#: Sets that are staged at a time on a worker that is replaced.
_AT_ONCE = 16
#: Parameters in force are not given to a further worker when so many have died while they were given them.
_DEATHS = 2
#: The most sets that a line in the log names.
_NAMED = 3


class _NoWorker(Exception):
    """Raised if no worker serves a model version whose parameters are to change, or if a worker ends during the change."""


@dataclass(slots=True, eq=False)
class _Given:
    """A note that a worker is given parameters. ``shared``: whether something besides them may be why the worker has died."""

    shared: bool


class Parameters:
    """Carries out clients' operations on parameter sets: push, revert, drop and list."""

    def __init__(self, options: Options, supervisor: Supervisor, models: Models) -> None:
        self._supervisor = supervisor
        self._models = models
        self._options = options.workers
        self._worker_wait = options.requests.worker_wait
        self._owners = options.supervisor.parameter_owners
        self.sets = PushedSets(options.supervisor.parameter_byte_size)
        self._next = itertools.count(1).__next__
        #: Name of a model -> its turn, while somebody has it or waits for it.
        self._turns: weakref.WeakValueDictionary[str, Turn] = weakref.WeakValueDictionary()
        #: Changes that run, or wait for their turn or for a worker.
        self._waiting = 0
        #: Version and set -> the highest number of a push on its way.
        self._claimed: dict[tuple[VersionKey, str], int] = {}
        #: Bytes of memory that came along with pushes on their way.
        self._coming_byte_size = 0
        #: Versions that are being changed, and were not loaded anew since that began.
        self._changing: set[VersionKey] = set()
        #: Worker and version that it has loaded and does not serve yet -> answers to its loads, in order.
        self._restoring: dict[tuple[int, VersionKey], deque[Loaded]] = {}
        #: Worker -> the parameters that it is given now.
        self._given: dict[int, list[_Given]] = {}
        #: Versions that a replaced worker could not be given everything of -> why.
        self._lacking: dict[VersionKey, str] = {}
        #: Set, and replaced, by ``tell``.
        self._news = asyncio.Event()
        #: Model and outcome, "pushed", "refused", "overtaken", "reverted" or "dropped" -> how often, ever.
        self.outcomes: Counter[tuple[str, str]] = Counter()

    # ------------------------------------------------------------------------------------------------ clients' operations

    async def push(self, wanted: PushParameters, peer: Peer, memory: int) -> bytes:
        """Sends the values of a push to all workers that serve the model version. If the push fails, no worker uses its values.

        ``peer``: the client. ``memory``: the descriptor that came with the push and that the caller must close, or -1.
        Returns JSON: model, version, set, number of the push and size of the values in bytes. Raises Replaced if another push
        into the same set has the number of this push or a higher number. Raises another ServingError if the push was refused.
        """
        try:
            push_checks.check_owner(self._owners, peer)
            push_checks.check(wanted, memory, self._options.max_parameter_byte_size)
            key = wanted.model, self._resolved(wanted.model, wanted.version, lacking=True)
            byte_size = os.fstat(memory).st_size if memory >= 0 else 0
            if self._coming_byte_size and self._coming_byte_size + byte_size > self.sets.limit:
                raise Unavailable(
                    f"{self._coming_byte_size} bytes of pushed parameters wait for their turn, {byte_size} more are beyond the "
                    f"{self.sets.limit} that are allowed (supervisor.parameter_byte_size)"
                )
            number = self._claim(key, wanted)
            self._coming_byte_size += byte_size
            try:
                content = await self._pushed(key, wanted, number, peer, memory)
            finally:
                self._coming_byte_size -= byte_size
                if self._claimed.get((key, wanted.set)) == number:
                    del self._claimed[key, wanted.set]
        except ServingError as error:
            # A name that no model has would be a label of its own.
            if wanted.model in self._models.lifecycle.models:
                self.outcomes[wanted.model, "overtaken" if isinstance(error, Replaced) else "refused"] += 1
            raise
        self.outcomes[key[0], "pushed"] += 1
        return _answer(key, wanted.set, content)

    async def revert(self, wanted: RevertParameters, peer: Peer) -> bytes:
        """Has every worker that serves a model version use the former values of a parameter set again.

        Returns JSON: model, version, set, and the former values' push number and size in bytes. An error changes nothing.
        Raises NotFound if the set has no former values. Raises another ServingError if the change fails.
        """
        push_checks.check_owner(self._owners, peer)
        key, name = (wanted.model, self._resolved(wanted.model, wanted.version)), wanted.set
        what = f"set '{name}' of model '{key[0]}' version {key[1]}"

        async def go_back() -> Content:
            found = self.sets.find(key, name)
            if found is None:
                raise NotFound(f"nothing was pushed into {what}")
            if (content := found.former) is None:
                raise NotFound(f"{what} has no number before {found.newest.number}")
            memory = await self._copied(key, name, content)
            try:
                stage = StageParameters(self._next(), *key, name, content.number)
                await self._exchange(key, stage, memory, False, lambda: self.sets.revert(key, name))
            finally:
                if memory >= 0:
                    os.close(memory)
            return content

        content = await self._in_turn(key, go_back)
        self.outcomes[key[0], "reverted"] += 1
        return _answer(key, name, content)

    async def drop(self, wanted: DropParameters, peer: Peer) -> bytes:
        """Removes a parameter set of a version, also on the workers. Later requests that name the set fail. Returns b"".

        Raises NotFound if the version or the set does not exist. Raises InvalidArgument if the set is ``main``. Raises
        Unsupported if the client may not change parameters.
        """
        push_checks.check_owner(self._owners, peer)
        if wanted.set == MAIN_SET:
            raise InvalidArgument(f"set '{MAIN_SET}' cannot be dropped: requests that name no set are answered with it")
        key = wanted.model, self._resolved(wanted.model, wanted.version, lacking=True)
        async with self._turn(wanted.model).change():
            if not self.sets.drop(key, wanted.set):
                raise NotFound(f"model '{key[0]}' version {key[1]} has no parameter set '{wanted.set}'")
            await self._put_in_force(key, self._serving(key), DropParameters(*key, wanted.set))
        self.outcomes[key[0], "dropped"] += 1
        return b""

    def listed(self, wanted: ListParameters) -> bytes:
        """Returns a JSON array of parameter sets. In ``wanted`` the model "", the version 0 or the set "" stands for all.

        A model without parameters, such as an ensemble, has no sets. If ``wanted`` names no model, no error is raised.
        Raises NotFound if the named model, version or set does not exist. Raises Unavailable if no set is found because no
        wanted version is ready yet, or because no wanted version can be served now. Raises InvalidArgument if ``wanted``
        names a derivative of a model, such as "m.pull_back".
        """
        found = [
            {"model": name, "version": number, "set": each, **_described(self.sets.find((name, number), each))}
            for name, model in sorted(self._models.lifecycle.models.items())
            for number, version in sorted(model.versions.items())
            if wanted.model in ("", name) and wanted.version in (0, number)
            for each in dict.fromkeys((*((MAIN_SET,) if _has_main(version) else ()), *self.sets.of((name, number))))
            if wanted.set in ("", each)
        ]
        if wanted.model and not found:
            key = wanted.model, self._resolved(wanted.model, wanted.version)
            if self._is_loading(key):
                raise Unavailable(f"model '{key[0]}' version {key[1]} is being loaded")
            if wanted.set:
                raise NotFound(f"model '{wanted.model}' has no parameter set '{wanted.set}'")
        return json.dumps(found).encode()

    # ------------------------------------------------------------------------------------------------------------- a push

    def _resolved(self, model: str, number: int, lacking: bool = False) -> int:
        check_not_derivative(model)
        models = self._models.lifecycle.models
        asked = {n: v for n, v in models[model].versions.items() if number in (0, n)} if model in models else {}
        served = [
            n for n, v in asked.items() if v.state is IndexState.READY or (lacking and (model, n) in self._lacking)
        ]
        if found := served or [n for n, version in asked.items() if version.state is IndexState.LOADING]:
            return max(found)
        check_given_up(models, model, number)
        raise NotFound(f"{UNKNOWN_MODEL}'{model}'{f' version {number}' if number else ''} is not ready")

    def _serving(self, key: VersionKey, leaving: bool = False) -> list[WorkerProcess]:
        """Returns the workers that serve a version, or if ``leaving`` is True are unloading it, and are not stopping."""
        version = self._models.lifecycle.version(*key)
        by_incarnation = self._supervisor.workers.by_incarnation
        wanted = () if version is None else version.unloading if leaving else version.ready
        found = (by_incarnation.get(incarnation) for incarnation in wanted)
        return [worker for worker in found if worker is not None and worker.alive and not worker.stopping]

    def _is_loaded_anew(self, key: VersionKey) -> bool:
        """Returns whether a worker that serves a version, even if no front knows so, is loading it again."""
        version = self._models.lifecycle.version(*key)
        return version is not None and not version.loading.keys().isdisjoint({*version.ready, *version.held})

    def _is_overtaken(self, worker: WorkerProcess, key: VersionKey) -> bool:
        """Returns whether a worker was sent another load of a version behind the one whose answer is being handled."""
        version = self._models.lifecycle.version(*key)
        return version is not None and len(version.loading.get(worker.incarnation, ())) > 1

    def _is_wanted(self, worker: WorkerProcess, key: VersionKey) -> bool:
        """Returns whether a worker is to serve a version that it has loaded."""
        version = self._models.lifecycle.version(*key)
        return version is not None and version.is_wanted(worker.incarnation, worker.device)

    def _is_loading(self, key: VersionKey) -> bool:
        """Returns whether a version is being loaded and no worker serves it."""
        version = self._models.lifecycle.version(*key)
        return version is not None and version.state is IndexState.LOADING

    def _claim(self, key: VersionKey, wanted: PushParameters) -> int:
        """Reserves and returns the number of a push, which no later push can get."""
        found = self.sets.find(key, wanted.set)
        highest = max(0 if found is None else found.highest, self._claimed.get((key, wanted.set), 0))
        number = wanted.number or highest + 1
        if number > _MAX_NUMBER:
            raise InvalidArgument(f"set '{wanted.set}' has the highest number that there is, {_MAX_NUMBER}")
        if number <= highest:
            raise _older(key, wanted.set, number, highest)
        sets = {MAIN_SET, *self.sets.of(key), *(name for claimed, name in self._claimed if claimed == key)}
        most = self._options.max_parameter_sets
        if wanted.set not in sets and len(sets) >= most:
            raise Unavailable(
                f"model '{key[0]}' version {key[1]} has {len(sets)} parameter sets, at most {most} are allowed "
                "(workers.max_parameter_sets)"
            )
        self._claimed[key, wanted.set] = number
        return number

    async def _pushed(self, key: VersionKey, wanted: PushParameters, number: int, peer: Peer, memory: int) -> Content:
        content = Content(number, pushed_at=time.time(), pushed_by=peer)
        if isinstance(wanted.source, FileSource) and not wanted.partial:
            # Before it is read: a file that changes meanwhile is another one.
            content.fingerprint = await self._fingerprint(key, wanted.source)
            content.file = wanted.source

        not_served = key in self._lacking and key[1] not in self._models.lifecycle.ready_models().get(key[0], [])
        if not_served and await self._brought_back(key, wanted, content, memory):
            return content

        def check() -> None:
            found = self.sets.find(key, wanted.set)
            newer = max(self._claimed.get((key, wanted.set), 0), number if found is None else found.highest)
            if newer > number or (found is not None and found.highest == number):
                raise _older(key, wanted.set, number, newer)

        async def change() -> Content:
            check()
            if content.memory < 0:
                content.memory = await self._made(key, wanted, memory)
                content.byte_size = os.fstat(content.memory).st_size
            stage = StageParameters(self._next(), *key, wanted.set, number, wanted.check_finite)
            put = functools.partial(self.sets.put, key, wanted.set, content)
            await self._exchange(key, stage, content.memory, wanted.move_sequences, put, check)
            return content

        try:
            return await self._in_turn(key, change)
        except BaseException:
            content.close()
            raise

    async def _brought_back(self, key: VersionKey, wanted: PushParameters, content: Content, memory: int) -> bool:
        """Has the version served with what is pushed. Returns False if it lacks nothing by now, or is gone."""
        of = f"model '{key[0]}' version {key[1]}"
        if memory < 0 or wanted.partial or wanted.checksum or not push_checks.is_sealed(memory):
            raise Unavailable(
                f"{of} is not served: {self._lacking[key]}; parameters that are pushed whole, as a body or a tree, bring it back"
            )
        async with self._turn(key[0]).change():
            if key not in self._lacking:
                return False
            with descriptors.needed(f"parameters of {of}"):
                content.memory = os.dup(memory)
            content.byte_size = os.fstat(memory).st_size
            self.sets.put(key, wanted.set, content)
            for found in self.sets.of(key).values():
                found.newest.deaths = 0  # which of them it was is not known
            del self._lacking[key]
            self._models.fill(*key)
        while True:
            version = self._models.lifecycle.version(*key)
            if version is None or version.state is IndexState.UNAVAILABLE:
                raise InvalidArgument(f"{of} is not served: {'it is gone' if version is None else version.reason}")
            if version.state is IndexState.READY:
                return True
            await self._news.wait()

    async def _made(self, key: VersionKey, wanted: PushParameters, memory: int) -> int:
        if memory >= 0 and not wanted.partial and not wanted.checksum and push_checks.is_sealed(memory):
            with descriptors.needed(f"parameters of model '{key[0]}'"):
                return os.dup(memory)
        operation = MakeParameters(*key, wanted.source, wanted.set, wanted.partial, wanted.checksum)
        return await self._make(next(iter(self._serving(key)), None), operation, memory)

    async def _make(self, worker: WorkerProcess | None, operation: MakeParameters, memory: int = -1) -> int:
        if worker is None:
            raise _NoWorker
        what = f"parameters of model '{operation.model}'"
        try:
            _, fds = await worker.call(operation, *([memory] if memory >= 0 else []))
        except ServingError:
            _check_death(worker, what)
            if not worker.alive:
                raise _NoWorker from None
            raise
        try:
            if not fds:
                raise descriptors.none_left(f"{what}: the server")
            descriptors.check_reserve(fds[0], what)
            return fds.pop(0)
        finally:
            descriptors.close(fds)

    async def _copied(self, key: VersionKey, name: str, content: Content, worker: WorkerProcess | None = None) -> int:
        if content.memory >= 0:
            return os.dup(content.memory)
        if content.file is None or await self._fingerprint(key, content.file) != content.fingerprint:
            return -1
        making = MakeParameters(*key, content.file, name, held=worker is not None)
        return await self._make(worker or next(iter(self._serving(key)), None), making)

    async def _fingerprint(self, key: VersionKey, source: FileSource) -> str:
        version = self._models.lifecycle.version(*key)
        if version is None:
            return ""
        folders = [Path(version.load.version_path), Path(version.load.model_path)]
        return await asyncio.to_thread(push_checks.fingerprint, folders, source.path)

    async def _exchange(
        self,
        key: VersionKey,
        stage: StageParameters,
        memory: int,
        move_sequences: bool,
        put: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        asked: list[WorkerProcess] = []
        workers: list[WorkerProcess] = []
        try:
            while missing := [worker for worker in self._serving(key) if worker not in asked]:
                asked += missing
                calls = [self._stage(worker, stage, memory) for worker in missing]
                for worker, result in zip(missing, await asyncio.gather(*calls, return_exceptions=True), strict=True):
                    if isinstance(result, BaseException):
                        _check_death(worker, f"number {stage.number} of set '{stage.set}'")
                        if worker.alive and not worker.stopping:
                            raise result
                check()
            if key not in self._changing:
                raise Unavailable(
                    f"model '{key[0]}' version {key[1]} was loaded anew before its parameters were exchanged"
                )
            workers = self._serving(key)
            if not workers:
                raise _NoWorker
        finally:
            # Also where the version was unloaded meanwhile: the worker would keep what it has staged.
            for worker in asked:
                if worker not in workers:
                    self._supervisor.spawn(self._carry_out(worker, AbortParameters(stage.push)))
        # Every worker has the values now, without using them. A worker that starts after ``put`` gets them as well, so that
        # the exchange holds from here on, whoever dies.
        put()
        await self._put_in_force(key, workers, CommitParameters(stage.push, move_sequences))

    async def _put_in_force(self, key: VersionKey, workers: list[WorkerProcess], operation: Operation) -> None:
        """Has workers carry out the last step of a change, and waits until no other worker takes requests for the version.

        Then the workers that could not be given what was in force before load the version.
        """
        leaving = self._serving(key, leaving=True)
        calls = [(worker, operation) for worker in workers] + [(worker, Settle()) for worker in leaving]
        await asyncio.gather(*(self._carry_out(*each) for each in calls))
        if self._lacking.pop(key, None):
            self._models.fill(*key)

    async def _stage(self, worker: WorkerProcess, stage: StageParameters, memory: int) -> None:
        with self._giving(worker):
            await worker.result_of(stage, *([memory] if memory >= 0 else []))

    @contextlib.contextmanager
    def _giving(self, worker: WorkerProcess) -> Iterator[_Given]:
        """Notes that ``worker`` is given parameters while the ``with`` block runs. Yields the note."""
        others = self._given.setdefault(worker.incarnation, [])
        given = _Given(shared=bool(others or worker.owed or not worker.alive))
        for other in others:
            other.shared = True
        others.append(given)
        try:
            yield given
        finally:
            given.shared |= bool(worker.owed)
            others.remove(given)
            if not others:
                self._given.pop(worker.incarnation, None)

    async def _carry_out(self, worker: WorkerProcess, operation: Operation) -> bool:
        """Makes a worker do ``operation``. Returns whether the worker did it. Kills the worker if it did not."""
        try:
            await worker.result_of(operation)
        except ServingError as error:
            if worker.alive and not worker.stopping:
                worker.kill(f"did not follow a change of parameters ({error.message})")
            return False
        return True

    # ------------------------------------------------------------------------------------------------------------- in turn

    def _turn(self, model: str) -> Turn:
        """Returns the turn in which the model's parameters are changed, and in which loads of the model begin to serve."""
        return self._turns.setdefault(model, Turn())

    async def _in_turn(self, key: VersionKey, change: Callable[[], Awaitable[Content]]) -> Content:
        """Calls ``change`` once a worker serves the version ``key`` and no other change of the model's parameters runs.

        If ``change`` raises _NoWorker, it is called again when the version may be served again. Other errors are passed on.
        Raises Unavailable if no call succeeds within ``requests.worker_wait`` s, beside the time in which it waits for its turn,
        or if 64 changes, of any models, run or wait.
        Raises NotFound if the version is neither served nor being loaded.
        """
        if self._waiting >= _MAX_WAITING:
            raise Unavailable(
                f"{self._waiting} changes of parameters are under way, at most {_MAX_WAITING} are allowed"
            )
        self._waiting += 1
        try:
            return await self._once_served(key, change)
        finally:
            self._waiting -= 1

    async def _once_served(self, key: VersionKey, change: Callable[[], Awaitable[Content]]) -> Content:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._worker_wait
        while True:
            self._resolved(*key)
            async with self._turn(key[0]).change():
                news = self._news  # of what happens from here on
                self._changing.add(key)
                try:
                    if self._serving(key) and not self._is_loaded_anew(key):
                        return await change()
                except _NoWorker:
                    pass
                finally:
                    self._changing.discard(key)
            if loop.time() >= deadline:
                loads = self._serving(key) or self._is_loading(key)
                why = "is being loaded" if loads else "has no worker: one is being replaced"
                raise Unavailable(f"model '{key[0]}' version {key[1]} {why}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - loop.time()):
                    await news.wait()

    # ------------------------------------------------------------------------------------------------- loads and workers

    def outdate(self, name: str, version: int) -> None:
        """Marks the values that clients pushed into a model version as outdated. Later loads of the version do not get them.

        Call this method when a reload from files begins. Workers that serve the version keep the values if the reload fails.
        """
        self._changing.discard((name, version))
        self._lacking.pop((name, version), None)
        self.sets.outdate((name, version))

    def forget(self, name: str, version: int, outdated: bool = False) -> None:
        """Drops the values that clients pushed into a model version.

        Call it at an unload, when a load of a version that does not serve begins, and after a reload from files.
        If ``outdated`` is True, drops only sets whose last push came before the last call of ``outdate`` for this version.
        """
        if not outdated:
            self._changing.discard((name, version))
            self._lacking.pop((name, version), None)
        if names := self.sets.forget((name, version), outdated):
            said = (
                f"{len(names)} parameter sets that were pushed into it are gone"
                if len(names) > 1
                else f"parameter set '{names[0]}' that was pushed into it is gone"
            )
            _log.warning("model '%s' version %d is loaded anew or unloaded: %s", name, version, said)
        self.tell()

    def loaded(self, worker: WorkerProcess, answer: Loaded) -> None:
        """Handles a worker's answer to a load: has the worker serve what it has loaded, with the values that clients pushed.

        A background task does this. Then it passes ``answer`` to ``Models``, or a failed load if the worker could not get the
        values, or a cancelled one if another load has overtaken this one. ``Models`` gets the answer of a failed load at once.
        """
        key = answer.name, answer.version
        if (waiting := self._restoring.get((worker.incarnation, key))) is not None:
            waiting.append(answer)
        elif answer.reason:
            self._pass_on(worker, answer)
        else:
            self._restoring[worker.incarnation, key] = deque([answer])
            self._supervisor.spawn(self._restore(worker, key))

    async def _restore(self, worker: WorkerProcess, key: VersionKey) -> None:
        waiting = self._restoring[worker.incarnation, key]
        try:
            while waiting:
                answer = waiting.popleft()
                # In turn: no push is under way meanwhile, and the next one finds this worker serving. One that dies is not heard.
                with contextlib.suppress(_NoWorker):
                    async with self._turn(key[0]).load():
                        if not answer.reason and (reason := await self._restored(worker, key)):
                            if not (overtaken := self._is_overtaken(worker, key)):
                                # Whoever serves an earlier load goes on with it.
                                if worker not in self._serving(key):
                                    worker.send(Unload(*key))
                                if worker.alive:
                                    self._lacking[key] = reason
                            answer = Loaded(*key, reason=reason, cancelled=overtaken)
                        self._pass_on(worker, answer)
        finally:
            del self._restoring[worker.incarnation, key]

    async def _restored(self, worker: WorkerProcess, key: VersionKey) -> str:
        push = self._next()
        free = asyncio.Semaphore(_AT_ONCE)

        async def restore(name: str, content: Content) -> str:
            what = f"parameter set '{name}' number {content.number}"
            async with free:
                if content.deaths >= _DEATHS:
                    return f"{what} is not given to another worker: {content.deaths} died of it"
                memory = -1
                try:
                    with self._giving(worker) as given:
                        memory = await self._copied(key, name, content, worker)
                        if memory < 0:
                            most = f"at most {self.sets.limit} are kept of all models (supervisor.parameter_byte_size)"
                            changed = ", and its file is another one now" if content.file is not None else ""
                            return f"{what} was not kept: {content.byte_size} bytes, {most}{changed}"
                        stage = StageParameters(push, *key, name, content.number, held=True)
                        await worker.result_of(stage, memory)
                except (_NoWorker, ServingError, OSError) as error:
                    # What else it died of may be a push, a load or another set: then a further worker is given these once more.
                    content.deaths += worker.ended_by_work and not given.shared
                    if worker.alive and descriptors.lacked(error):
                        raise
                    return f"{what} cannot be restored: {str(error) or 'the worker died'}"
                finally:
                    if memory >= 0:
                        os.close(memory)
            return ""

        wanted = [(name, found.newest) for name, found in self.sets.to_restore(key).items() if found.newest.number]
        restoring = (open_files.awaited(functools.partial(restore, *each)) for each in wanted)
        async with self._turn(key[0]).restoring if wanted else contextlib.nullcontext():
            failed = next(filter(None, await asyncio.gather(*restoring)), "")
            if failed or (wanted and not self.sets.to_restore(key)):
                self._supervisor.spawn(self._carry_out(worker, AbortParameters(push)))
                # Else it is being loaded anew: what the worker is to serve until then, or serves by now, is without them.
                if self.sets.to_restore(key):
                    return failed
            elif wanted:
                if not await self._carry_out(worker, CommitParameters(push)):
                    raise _NoWorker
                _log.info(
                    "%s has what was pushed into model '%s' version %d: %s",
                    worker.name,
                    *key,
                    ", ".join(f"'{name}' number {content.number}" for name, content in wanted[:_NAMED])
                    + (f" and {len(wanted) - _NAMED} more" if len(wanted) > _NAMED else ""),
                )
        if self._is_overtaken(worker, key):
            return "another load of it came"
        if self._is_wanted(worker, key) and not await self._carry_out(worker, ServeLoaded(*key)):
            raise _NoWorker
        return ""

    def _pass_on(self, worker: WorkerProcess, answer: Loaded) -> None:
        if worker.alive:
            self._models.loaded(worker.incarnation, answer)
        self.tell()

    def tell(self) -> None:
        """Wakes operations that wait until a model version serves. Call it when one may have begun to serve."""
        self._news.set()
        self._news = asyncio.Event()

    # ------------------------------------------------------------------------------------------------------------- others

    def describe(self) -> dict[str, Any]:
        """Returns the bytes of all pushed sets, their limit, and the number of sets of each version, as values for JSON."""
        versions = [
            {"model": name, "version": version, "sets": count, "number": number}
            for (name, version), (count, number) in sorted(self.sets.by_version().items())
        ]
        return {"byte_size": self.sets.byte_size, "max_byte_size": self.sets.limit, "versions": versions}

    def close(self) -> None:
        """Drops all values that clients have pushed. May be called again."""
        if count := sum(1 for _ in self.sets):
            _log.warning(
                "pushed parameter sets end with this daemon (%d): the next one serves the repositories'", count
            )
        self.sets.close()

    def __repr__(self) -> str:
        return f"<Parameters {sum(1 for _ in self.sets)} sets, {self.sets.byte_size} bytes>"


def _check_death(worker: WorkerProcess, what: str) -> None:
    if worker.ended_by_work:
        raise Internal(f"{what}: the worker process that was given them {worker.describe_exit()}")


def _has_main(version: VersionEntry) -> bool:
    # Also while all of its workers are being replaced.
    return version.state is IndexState.READY and version.described is not None and version.described.has_parameters


def _older(key: VersionKey, name: str, number: int, other: int) -> Replaced:
    return Replaced(f"number {number} of set '{name}' of model '{key[0]}' is not newer than {other}")


def _answer(key: VersionKey, name: str, content: Content) -> bytes:
    found = {"model": key[0], "version": key[1], "set": name, "number": content.number, "byte_size": content.byte_size}
    return json.dumps(found).encode()


def _described(found: PushedSet | None) -> dict[str, Any]:
    if found is None:
        return Content(0).describe()
    former = {} if found.former is None else {"number_before": found.former.number}
    return found.newest.describe() | former
