"""Operations on models: what clients, the start and a reload ask for, carried out through the lifecycle's instructions.

Files are read off the loop; decisions are ``daemon.models.lifecycle``'s. A configuration that came with a load that succeeded
stays in force for later plain loads, until the model's files change or it is unloaded. Files that a client gave are the model
until the next load or unload.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from config.options import RateLimit, Repository
from daemon.models import load_errors, readiness, repository
from daemon.models.given import GivenModels
from daemon.models.instructions import Instruction, Publish, Retry, Send, Settled
from daemon.models.lifecycle import Lifecycle
from daemon.models.readiness import Standing
from daemon.models.repository import FoundModel
from shm.control_records import Loaded, ModelGone, ModelState
from shm.errors import Internal, InvalidArgument, ServingError, Unavailable, Unsupported
from shm.operations import LoadModel
from shm.progress import Readiness
from shm.record import Record

_log = logging.getLogger(__name__)


class Peer(Protocol):
    """What is needed of a worker."""

    name: str

    def send(self, record: Record, *fds: int) -> None: ...


class Models:
    """Owns the lifecycle. ``workers`` is the supervisor's live table; ``publish`` reaches every front."""

    def __init__(
        self,
        options: Repository,
        workers: Mapping[int, Peer],
        publish: Callable[[ModelState | ModelGone | Readiness], None],
        devices: Callable[[], Sequence[str]],
        rate_limit: RateLimit,
    ) -> None:
        """``devices``: of every worker's post, filled or not."""
        self._devices = devices
        self._rate_limit = rate_limit
        self._options = options
        self._workers = workers
        self._publish = publish
        self.lifecycle = Lifecycle()
        #: Whether the daemon is ready, as it was published last; not before it is known what is wanted.
        self.readiness = Readiness()
        self._begun = False
        #: Names that should be served: in the repositories, or asked for by name and not unloaded since.
        self._wanted: set[str] = set()
        #: Names that could not even be tried when they were asked for last, with the reason.
        self._refused: dict[str, str] = {}
        #: Repositories that cannot be read, and may be so, with the reason. No model can have such a name.
        self._unreadable: dict[str, str] = {}
        #: When versions that are given up are tried again.
        self._retries: dict[tuple[str, int], asyncio.TimerHandle] = {}
        #: ``repository.load`` as it was last acted upon.
        self._listed: set[str] = set()
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[str]] = {}
        #: name -> (fingerprint of the files it was given for, configuration in JSON).
        self._overrides: dict[str, tuple[str, str]] = {}
        self._given = GivenModels()
        #: name -> folders of given files: one may be served, others are coming or going.
        self._given_folders: dict[str, list[Path]] = {}
        #: Those whose load is not over.
        self._coming: set[Path] = set()

    # --------------------------------------------------------------------------------------------- clients' operations

    async def load(self, request: LoadModel) -> None:
        """Loads or reloads a model by name and waits for the outcome.

        Raises: Unavailable: not in explicit mode.  Internal, InvalidArgument: Triton's sentences; or what is wrong in what the
        client gave.  Unsupported: the model asks for what is not offered.
        """
        self._only_explicit()
        try:
            if request.files:
                await self._load_given(request.name, request.files, request.config)
            else:
                await self._load_found(request.name, request.config)
        finally:
            self._drop_unused(request.name)

    async def _load_found(self, name: str, config: str) -> None:
        """Loads a model of a repository, with a client's configuration where one is given now or holds from before."""
        found = await asyncio.to_thread(self._poll, name)
        fingerprint, former = self._overrides.get(name, ("", ""))
        given = config or (former if fingerprint == found.fingerprint else "")
        loaded = found
        if given and found.path.name:
            loaded = await asyncio.to_thread(_overridden, found.path, given)
        elif found.error:
            _log.error("model '%s' cannot be polled: %s", name, found.error)
            if name in self.lifecycle.known | self._wanted:
                self._refused[name] = found.error
                self._judge()
            if found.unsupported:
                raise Unsupported(load_errors.given_error(name, found.error))
            raise Internal(load_errors.poll_error([name]))
        if error := await self._bring(loaded):
            raise InvalidArgument(error)
        if given:
            self._overrides[name] = (found.fingerprint, given)
        else:
            self._overrides.pop(name, None)

    async def _load_given(self, name: str, files: Mapping[str, bytes], config: str) -> None:
        """Loads the model that consists of a client's files, in a folder of its own."""
        if not config:
            raise InvalidArgument(load_errors.given_error(name, "files are given without a 'config'"))
        if not repository.NAME.fullmatch(name):
            raise InvalidArgument(load_errors.given_error(name, "no model can have that name"))
        try:
            folder = await asyncio.to_thread(self._given.keep, name, files)
        except InvalidArgument as error:
            raise InvalidArgument(load_errors.given_error(name, error.message)) from None
        except OSError as error:
            raise Unavailable(load_errors.given_error(name, f"its files cannot be kept: {error.strerror}")) from None
        self._coming.add(folder)
        self._given_folders.setdefault(name, []).append(folder)
        try:
            if failure := await self._bring(await asyncio.to_thread(_overridden, folder, config)):
                raise InvalidArgument(failure)
        finally:
            self._coming.discard(folder)
        self._overrides.pop(name, None)

    def _drop_unused(self, name: str) -> None:
        """Removes folders of given files that no version of that name needs any more."""
        folders = self._given_folders.pop(name, [])
        needed = self.lifecycle.folders(name)
        kept = [folder for folder in folders if str(folder) in needed or folder in self._coming]
        if kept:
            self._given_folders[name] = kept
        for folder in folders:
            if folder not in kept:
                asyncio.get_running_loop().run_in_executor(None, self._given.drop, folder)

    def unload(self, name: str) -> None:
        """Begins to take a model away; unknown names are no error. Raises Unavailable: not in explicit mode."""
        self._only_explicit()
        self._overrides.pop(name, None)
        self._wanted.discard(name)
        self._refused.pop(name, None)
        token = self._token()
        gone = self._waiting[token] = asyncio.get_running_loop().create_future()
        gone.add_done_callback(lambda _: self._drop_unused(name))
        self._begin(self.lifecycle.unload(name, token))

    def close(self) -> None:
        """Tries nothing again, and removes the files that clients gave; to be called when no worker runs."""
        for timer in self._retries.values():
            timer.cancel()
        self._given.close()

    async def index(self, ready: bool) -> list[dict[str, str]]:
        """The repository index, with what lies in the folders now."""
        folders = Counter(folder.name for folder in await asyncio.to_thread(_readable_folders, self._paths()))
        self.lifecycle.known = set(folders)
        refused = {name: reason for name, reason in self._refused.items() if name in folders or name in self._wanted}
        refused |= {name: repository.DUPLICATE for name, count in folders.items() if count > 1}
        found = {(entry["name"], entry.get("version", "")): entry for entry in self.lifecycle.index(ready)}
        now = asyncio.get_running_loop().time()
        for (name, version), timer in self._retries.items():
            entry = found.get((name, str(version)))
            if entry is not None and self.lifecycle.reason(name, version):
                entry["reason"] += f"; it is tried again in {max(0.0, timer.when() - now):.0f} s"
        listed = {name for name, version in found if version}
        for name in refused.keys() - listed if not ready else ():
            found[name, ""] = {"name": name, "state": "UNAVAILABLE", "reason": refused[name]}
        # By name and number; the versions of a name are in order already.
        return sorted(found.values(), key=lambda entry: entry["name"])

    def _only_explicit(self) -> None:
        if self._options.control_mode != "explicit":
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")

    def _poll(self, name: str) -> FoundModel:
        # Only a well-formed name may become part of a path.
        if repository.NAME.fullmatch(name):
            places = [path / name for path in self._paths() if (path / name).is_dir()]
            if len(places) == 1:
                return repository.poll(places[0])
            if places:
                return FoundModel(name, Path(), error=repository.DUPLICATE)
        return FoundModel(name, Path(), error="it is in no repository")

    # ------------------------------------------------------------------------------------------------ start and reload

    async def scan(self, options: Repository) -> dict[str, FoundModel]:
        """What lies in the folders that ``options`` names. Raises InvalidArgument: one cannot be read, and has to be."""
        paths = [Path(path) for path in options.paths]
        if options.exit_on_error is False:
            unreadable = await asyncio.to_thread(repository.unreadable, paths)
            # Clients are told the name alone.
            self._unreadable = {f"repository '{path.name}'": f"'{path}': {why}" for path, why in unreadable.items()}
            for path, reason in unreadable.items():
                _log.error("model repository '%s' cannot be read: %s; a reload looks again", path, reason)
            paths = [path for path in paths if path not in unreadable]
        return await asyncio.to_thread(repository.scan, paths)

    def begin(self, found: Mapping[str, FoundModel], options: Repository) -> list[asyncio.Future[str]]:
        """Begins to load what should be served and to unload what no longer should; the futures are the outcomes ("" or why not).

        At the start, and again with new options after a reload.
        """
        self._options = options
        self._begun = True
        self.lifecycle.known = set(found)
        if options.control_mode == "none":
            wanted: Iterable[str] = found
            self._wanted = set(found)
            for name in self.lifecycle.models.keys() - found.keys():
                self._begin(self.lifecycle.unload(name, self._token()))
        elif "*" in options.load:
            wanted = found
        else:
            # Explicit models that clients loaded stay as they are; names that are new in the list, or do not serve, are loaded.
            served = self.lifecycle.ready_models()
            again = self._wanted - served.keys()
            wanted = [name for name in dict.fromkeys(options.load) if name not in self._listed or name in again]
        self._listed = set(options.load)
        self._forget(found)
        self._wanted.update(wanted)
        self._judge()
        return [asyncio.ensure_future(self._bring_wanted(name, found.get(name))) for name in wanted]

    def _forget(self, found: Mapping[str, FoundModel]) -> None:
        """What is in no repository any more and serves nothing is neither listed nor counted."""
        for name in list(self.lifecycle.models):
            self._begin(self.lifecycle.forget(name, found[name].versions if name in found else ()))
        self._wanted &= self.lifecycle.models.keys() | found.keys() | self._listed
        self._refused = {name: reason for name, reason in self._refused.items() if name in self._wanted | found.keys()}

    async def _bring_wanted(self, name: str, found: FoundModel | None) -> str:
        if found is None or found.error:
            reason = "it is in no repository" if found is None else found.error
            self._refuse(name, reason)
            return f"model '{name}' cannot be polled: {reason}"
        return await self._bring(found)

    async def _bring(self, found: FoundModel) -> str:
        self._wanted.add(found.name)
        if not found.chosen:
            self._refuse(found.name, found.problem)
            return load_errors.no_version_error(found.name)
        try:
            found = repository.placed(found, self._devices(), self._rate_limit)
        except InvalidArgument as error:
            self._refuse(found.name, error.message)
            return load_errors.placement_error(found.name, error.message)
        self._refused.pop(found.name, None)
        known = self.lifecycle.models.get(found.name)
        if known is None or known.fingerprint != found.fingerprint:
            for sentence in found.without_effect:
                _log.warning("model '%s': %s", found.name, sentence)
        token = self._token()
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[token] = outcome
        self._begin(self.lifecycle.load(found, token))
        return await outcome

    def _refuse(self, name: str, reason: str) -> None:
        _log.error("model '%s' is not served: %s", name, reason)
        self._refused[name] = reason
        self._judge()

    # ------------------------------------------------------------------------------------------------------- readiness

    def standings(self) -> list[Standing]:
        """Every model that should be served, by name, and every repository that cannot be read."""
        refused = {**self._refused, **self._unreadable}
        return readiness.standings({*self._wanted, *self._unreadable}, refused, self.lifecycle)

    def _judge(self) -> None:
        """Tells the fronts whether the daemon is ready, where that or the models it names have changed."""
        judged = readiness.readiness(self.standings(), self._options.strict_readiness)
        if self._begun and judged != self.readiness:
            self.readiness = judged
            self._publish(judged)

    # ----------------------------------------------------------------------------------------------- workers and fronts

    def worker_joined(self, incarnation: int, device: str) -> None:
        """Sends a new worker every model."""
        self._begin(self.lifecycle.worker_joined(incarnation, device))

    def worker_left(self, incarnation: int, how: str) -> None:
        """Tells fronts that a dead worker serves nothing. ``how`` it ended: "was killed by SIGSEGV"."""
        self._begin(self.lifecycle.worker_left(incarnation, how))

    def loaded(self, incarnation: int, answer: Loaded) -> None:
        """A worker's answer to Load."""
        if answer.reason:
            _log.error("model '%s' version %d failed to load: %s", answer.name, answer.version, answer.reason)
        else:
            _log.info("model '%s' version %d is loaded", answer.name, answer.version)
        self._begin(self.lifecycle.loaded(incarnation, answer))

    def unloaded(self, incarnation: int, name: str, version: int) -> None:
        """A worker's answer to Unload."""
        _log.info("model '%s' version %d is unloaded", name, version)
        self._begin(self.lifecycle.unloaded(incarnation, name, version))

    def states(self) -> list[ModelState | Readiness]:
        """What a new front must know."""
        return [*self.lifecycle.states(), self.readiness]

    def _begin(self, instructions: Sequence[Instruction]) -> None:
        """Carries instructions out, in order."""
        for instruction in instructions:
            match instruction:
                case Send(worker, record):
                    self._workers[worker].send(record)
                case Publish(state):
                    self._publish(state)
                case Retry():
                    self._retry_later(instruction)
                case Settled(token, error):
                    waiting = self._waiting.pop(token, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(error)
        self._judge()

    def _retry_later(self, due: Retry) -> None:
        key = (due.name, due.version)

        def retry() -> None:
            del self._retries[key]
            if self.lifecycle.reason(*key):
                _log.info("model '%s' version %d is tried again", *key)
            self._begin(self.lifecycle.retry(*key, due.deaths))

        if (former := self._retries.pop(key, None)) is not None:
            former.cancel()
        self._retries[key] = asyncio.get_running_loop().call_later(due.seconds, retry)
        _log.error(
            "model '%s' version %d is given up for now: %s; it is tried again in %g s",
            *key,
            self.lifecycle.reason(*key),
            due.seconds,
        )

    def _token(self) -> int:
        return next(self._tokens)

    def _paths(self) -> list[Path]:
        return [Path(path) for path in self._options.paths]


def _readable_folders(paths: Sequence[Path]) -> list[Path]:
    unreadable = repository.unreadable(paths)
    return repository.folders([path for path in paths if path not in unreadable])


def _overridden(folder: Path, config: str) -> FoundModel:
    """The model of a folder with a client's configuration. Raises InvalidArgument, Unsupported: as the client is told."""
    try:
        found = repository.override(folder, config)
    except ServingError as error:
        raise type(error)(load_errors.given_error(folder.name, error.message)) from None
    if not found.chosen:
        raise InvalidArgument(load_errors.no_version_error(folder.name))
    return found
