"""Carries out operations on a worker's parameter sets (``tensord.shm.operations``), which the daemon's supervisor sends.

MakeParameters copies parameters into sealed memory. StageParameters checks parameters and places them on the device.
A separate thread carries out these two operations and frees replaced parameters. The thread does nothing else, so that neither
operation waits for a model to be loaded, and the worker's loop waits for neither operation.
CommitParameters puts staged parameters into use between two batches.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tensord.config.options import Workers
from tensord.shm.arrays import Array
from tensord.shm.errors import UNKNOWN_MODEL, Internal, NotFound, ServingError, Unsupported
from tensord.shm.operations import (
    MAIN_SET,
    AbortParameters,
    CommitParameters,
    DropParameters,
    MakeParameters,
    StageParameters,
)
from tensord.workers.models.model_table import ModelTable
from tensord.workers.models.model_version import AgendaPart, ModelVersion
from tensord.workers.parameters import layout, sources
from tensord.workers.parameters.leaves import check_finite
from tensord.workers.parameters.parameter_set import ParameterSet, ParameterSets
from tensord.workers.parameters.sealed_memory import KEPT_NS, MemoryPool, SealedMemory
from tensord.workers.regions.region_table import RegionTable
from tensord.workers.scheduling.agenda import NEVER, Agenda
from tensord.workers.threads.work_thread import WorkThread

_log = logging.getLogger(__name__)
ParameterOperation = MakeParameters | StageParameters | CommitParameters | AbortParameters | DropParameters
#: Answers a call: with a result and perhaps a descriptor, which stays the caller's; or with an error.
Answer = Callable[[bytes | ServingError, int | None], None]
_DONE = b"{}"


class _Staged(NamedTuple):
    """A parameter set of a pending push that is on the device and not in use yet, and the model version that will use it."""

    version: ModelVersion
    parameters: ParameterSet


class ParameterPushes:
    """Stages pushes (checks their parameters and places them on the device), commits or aborts pushes, and drops sets."""

    def __init__(
        self, models: ModelTable, regions: RegionTable, thread: WorkThread, options: Workers, agenda: Agenda[AgendaPart]
    ) -> None:
        """Begins without pushes.

        ``thread``: copies, stages and frees parameters. ``agenda``: calls functions on the worker's event loop at given times.
        """
        self._models = models
        self._regions = regions
        self._thread = thread
        self._agenda = agenda
        #: Used in the thread alone, and in ``close``, when the thread has no job left.
        self._pool = MemoryPool()
        #: True if a call of ``_expire``, which frees memory of former pushes, is due or under way.
        self._expires = False
        self._limit = options.max_parameter_byte_size
        self._most = options.max_parameter_sets
        #: Push -> what is staged for it.
        self._staged: dict[int, list[_Staged]] = {}

    def carry_out(self, operation: ParameterOperation, fds: list[int], answer: Answer) -> None:
        """Carries out an operation on parameter sets. Passes the result to ``answer``, possibly after this method has returned.

        Raises ServingError, without a call of ``answer``, if the operation fails at once. Passes a later error to ``answer``.
        ``fds``: the operation's file descriptors. The caller closes those that are still in the list afterwards.
        """
        if isinstance(operation, MakeParameters):
            return self._make(operation, fds, answer)
        if isinstance(operation, StageParameters):
            return self._stage(operation, fds, answer)
        if isinstance(operation, CommitParameters):
            self._commit(operation)
        elif isinstance(operation, AbortParameters):
            self._forget(operation.push)
        elif (version := self._models.serving(operation.model, operation.version)) is not None:
            # Else an Unload that came before it has taken the set along.
            self._let_go(self._sets(version).drop(operation.set))
        return answer(_DONE, None)

    def _find(self, model: str, version: int, held: bool = False) -> ModelVersion:
        """Returns a version that is served or, if ``held`` is true, the load of it that is not served yet. Raises NotFound."""
        found = self._models.held.get((model, version)) if held else self._models.serving(model, version)
        if found is None:
            raise NotFound(f"{UNKNOWN_MODEL}'{model}' version {version} is not found")
        return found

    @staticmethod
    def _sets(version: ModelVersion) -> ParameterSets:
        """Returns a version's parameter sets. Raises Unsupported: it has none."""
        if version.sets is None:
            kind = "an ensemble" if version.loaded.ensemble is not None else "a Triton Python model"
            raise Unsupported(f"model '{version.name}' is {kind}, which has no parameters that the server knows")
        version.sets.leaves.check_named()
        return version.sets

    # ------------------------------------------------------------------------------------------------------------ making

    def _make(self, operation: MakeParameters, fds: list[int], answer: Answer) -> None:
        version = self._find(operation.model, operation.version, operation.held)
        sets, record = self._sets(version), version.loaded.record
        assert record is not None  # only ensembles have none, and they have no sets
        base = (sets.newest(operation.set) or sets.main) if operation.partial else None
        folders = Path(record.version_path), Path(record.model_path)
        fd, limit = fds[0] if fds else None, self._limit
        making = sources.plan(operation, folders, fd, self._regions, self._pool, limit, sets.leaves, base)
        fds.clear()

        def made(outcome: int | Exception) -> None:
            making.close()
            self._expire_later()
            if isinstance(outcome, Exception):
                answer(_error(outcome, making.what), None)
                return
            try:
                answer(json.dumps({"byte_size": os.fstat(outcome).st_size}).encode(), outcome)
            finally:
                os.close(outcome)

        self._thread.do(making.make, made)

    def _expire_later(self) -> None:
        if not self._expires:
            self._expires = True
            self._agenda.put(self._expire, time.monotonic_ns() + KEPT_NS)

    def _expire(self, now_ns: int) -> None:
        def done(keeps: bool | Exception) -> None:
            self._expires = False
            if keeps:
                self._expire_later()

        self._thread.do(lambda: self._pool.expire(now_ns), done)

    # ----------------------------------------------------------------------------------------------------------- staging

    def _stage(self, operation: StageParameters, fds: list[int], answer: Answer) -> None:
        version = self._find(operation.model, operation.version, operation.held)
        sets = self._sets(version)
        sets.check_count(operation.set, self._most)
        what = f"number {operation.number} of set '{operation.set}'"
        kept = None if fds else sets.kept(operation.set, operation.number)
        fd = fds.pop() if fds else -1
        self._staged.setdefault(operation.push, [])
        #: Nobody evicts it while it is placed.
        staged = kept or ParameterSet(sets, operation.set, operation.number, None)
        sets.staged.add(staged)

        def stage() -> ParameterSet:
            try:
                if kept is None:
                    staged.fill(self._checked(fd, sets, operation, what))
                staged.prepare()
                return staged
            finally:
                if fd >= 0:
                    os.close(fd)

        def done(outcome: ParameterSet | Exception) -> None:
            here = self._staged.get(operation.push)
            gone = not self._is_here(version)
            if not isinstance(outcome, Exception) and here is not None and not gone:
                here.append(_Staged(version, outcome))
                answer(json.dumps({"byte_size": outcome.byte_size}).encode(), None)
                return
            self._unstage(staged)
            if here is not None and not here:
                del self._staged[operation.push]
            if isinstance(outcome, Exception):
                answer(_error(outcome, what), None)
            else:
                why = "its model is not loaded any more" if gone else "its push was aborted"
                answer(NotFound(f"{what} is not staged: {why}"), None)

        self._thread.do(stage, done)

    def _checked(self, fd: int, sets: ParameterSets, operation: StageParameters, what: str) -> list[Array | None]:
        memory = SealedMemory(fd)
        layout.check_size(memory.byte_size, self._limit, what)
        found = layout.read(memory.view, what, sets.leaves)
        leaves = sets.leaves.fitted(found, what, operation.set != MAIN_SET)
        memory.populate()
        layout.check_truth(found, what)
        if operation.check_finite:
            check_finite(sets.leaves, leaves, what)
        return leaves

    def _commit(self, operation: CommitParameters) -> None:
        staged = self._staged.pop(operation.push, [])
        if not staged:
            raise NotFound(f"nothing is staged for push {operation.push}")
        for version, parameters in staged:
            if not self._is_here(version):
                parameters.sets.staged.discard(parameters)
                # This version is not loaded any more.
                continue
            replaced = version.commit(parameters, operation.move_sequences)
            self._let_go(replaced.unused)
            if replaced.leaves is not None:
                self._leave(replaced.leaves)
            if parameters.name == MAIN_SET:
                # What the C part has learned of answers and of timelines names the parameters before.
                self._models.changes += 1
            _log.debug("%s is in use", parameters)

    def _forget(self, push: int) -> None:
        for _, parameters in self._staged.pop(push, []):
            self._unstage(parameters)

    def _unstage(self, parameters: ParameterSet) -> None:
        parameters.sets.staged.discard(parameters)
        if not parameters.is_newest:
            self._let_go([parameters.leave()])

    def _leave(self, former: ParameterSet) -> None:
        def leave() -> None:
            # The room for versions before may have been too small for it.
            if former.sets.keeps(former):
                former.hosted()
            former.leave()

        def done(outcome: Exception | None) -> None:
            if outcome is not None:
                _log.error("%s is not kept", former, exc_info=outcome)
                former.sets.forget_before(former)

        self._thread.do(leave, done)

    def _let_go(self, unused: list[object]) -> None:
        # Freeing objects takes long. The list has the only references to them.
        self._thread.do(unused.clear, lambda _: None)

    def _is_here(self, version: ModelVersion) -> bool:
        key = version.name, version.version
        return version in (self._models.held.get(key), self._models.serving(*key))

    def close(self) -> None:
        """Frees the memory that is kept for later pushes. Does nothing if work on an earlier push has not ended."""
        if not self._thread.pending:
            self._pool.expire(NEVER)

    def __repr__(self) -> str:
        return f"<ParameterPushes {sorted(self._staged)}>"


def _error(error: Exception, what: str) -> ServingError:
    """Returns the error for the client whose push failed with ``error``. ``what`` names the push in the error and the log."""
    if isinstance(error, ServingError):
        # A traceback would keep memory.
        return error.with_traceback(None)
    _log.error("%s could not be placed", what, exc_info=error)
    error.__traceback__ = None
    return Internal(f"{what} could not be placed: {type(error).__name__}")
