"""Finds the processes that a model's code has started, and ends these processes when the model is unloaded.

Python's functions that start processes are patched. A program that a model's code starts gets an environment variable that
identifies the model, and processes that the program starts inherit the variable. A process that a model's code forks is
recorded by its process id, and programs that it executes get the variable. Descendants of all these processes count, too.

After the unload, the processes have 0.5 s to end by themselves. Then the processes that still run get SIGTERM. Processes that
still run 3 s later get SIGKILL.

The resource tracker and the fork server of multiprocessing end only with the worker, because all models share them.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import errno
import functools
import itertools
import logging
import multiprocessing.process
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensord.shm import descriptors, marked_processes
from tensord.shm.marked_processes import MARK, Found
from tensord.workers.calls.caller import ModelPort, caller

_log = logging.getLogger(__name__)
#: Seconds for processes that ``finalize`` has told to end, and for those that got SIGTERM.
_MOMENT = 0.5
_PATIENCE = 3.0
_INTERVAL = 0.05
#: Modules that start the processes of multiprocessing that all models of a worker share.
_SHARED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
#: Position of the environment among the arguments of ``fork_exec``.
_ENVIRONMENT = 5
_PORT = "_tensord_port"


class OwnProcesses:
    """Finds and ends the processes that a model's code has started. Any thread may use this object."""

    _serials = itertools.count(1)

    def __init__(self, name: str) -> None:
        self._name = name
        self._mark = f"{_worker_mark()}.{next(self._serials)}"
        self._lock = threading.Lock()
        #: Forked processes, which have the worker's environment and no mark.
        self._forked: dict[int, Found] = {}
        self._prune_at = 64
        self._ending: threading.Thread | None = None
        self._closed = False

    @property
    def ended(self) -> bool:
        """True once ``close`` was called and all of the model's processes have ended."""
        return self._ending is not None and not self._ending.is_alive()

    def mark(self) -> str:
        """Returns the value that the environment variable _TENSORD_MARK has in each program that the model's code starts.

        No other model has the same value. Raises OSError if ``close`` was called.
        """
        if self._closed:
            raise OSError(errno.ECANCELED, f"model '{self._name}' is unloaded, and starts no more processes")
        return self._mark

    def forked(self, pid: int) -> None:
        """Records a process that the model's code has forked, so that ``close`` ends it."""
        with contextlib.suppress(OSError):  # no file can be opened: the worker's death ends it
            found = marked_processes.look(pid)
            with self._lock:  # briefly: a process that is forked meanwhile has it locked for ever
                if found is not None:
                    self._forked[pid] = found
                if len(self._forked) > self._prune_at:
                    self._forked = {
                        pid: each for pid, each in self._forked.items() if marked_processes.look(pid) == each
                    }
                    self._prune_at = 2 * len(self._forked) + 64

    def close(self) -> None:
        """Starts a thread that ends all processes that the model's code has started, by SIGKILL if they ignore SIGTERM.

        Idempotent. ``ended`` tells when the thread is done.
        """
        with self._lock:
            self._closed = True
            if self._ending is None:
                self._ending = threading.Thread(target=self._end, name=f"processes of {self._name}", daemon=True)
                self._ending.start()

    def _end(self) -> None:
        try:
            while True:
                try:
                    return self._end_all()
                except OSError as error:
                    if not descriptors.lacked(error):
                        raise
                time.sleep(descriptors.AGAIN_SECONDS)
        finally:
            for pid in list(self._forked):
                # Nobody else waits for it any more.
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)

    def _end_all(self) -> None:
        if not (found := self._wait(_MOMENT)):
            return
        count = len(found)
        for each in found:
            marked_processes.send(each, signal.SIGTERM)
        killed = 0
        if found := self._wait(_PATIENCE):
            killed = len(found)
            while found:
                for each in found:
                    marked_processes.send(each, signal.SIGKILL)
                time.sleep(_INTERVAL)
                found = self._found()
        left = "model '%s' left %d processes running: they are ended (%d by SIGKILL)"
        _log.warning(left, self._name, max(count, killed), killed)

    def _wait(self, seconds: float) -> list[Found]:
        """Waits up to ``seconds`` for the model's processes to end. Returns those still running."""
        until = time.monotonic() + seconds
        while (found := self._found()) and time.monotonic() < until:
            time.sleep(_INTERVAL)
        return found

    def _found(self) -> list[Found]:
        """Returns the model's running processes, with all descendants."""
        everybody = marked_processes.everybody()
        with self._lock:
            forked = dict(self._forked)
        own = {
            each.pid: each
            for each in everybody
            if (forked.get(each.pid) or each)._replace(parent=each.parent) == each
            and (each.pid in forked or marked_processes.has(each, self._mark))
        }
        while children := [each for each in everybody if each.parent in own and each.pid not in own]:
            own |= {each.pid: each for each in children}
        return list(own.values())

    def __repr__(self) -> str:
        return f"<OwnProcesses of {self._name!r}>"


@functools.cache
def _worker_mark() -> str:
    return os.environ.get(MARK) or secrets.token_hex(8)


def _owner() -> OwnProcesses | None:
    found = caller()
    port: ModelPort | None = getattr(threading.current_thread(), _PORT, None) if found is None else found.port
    if port is None:
        return None
    frame = sys._getframe(2)
    for _ in range(4):
        if frame is None or frame.f_globals.get("__name__") in _SHARED:
            return None
        frame = frame.f_back  # type: ignore[assignment]
    if port.processes is None:
        port.processes = OwnProcesses(port.name)
        port.held[port.processes] = None
    processes = port.processes
    assert isinstance(processes, OwnProcesses)
    return processes


# ---------------------------------------------------------------------------------------------------------- Python's ways


def prepare() -> None:
    """Patches Python's functions that start processes and threads, to find out which model's code calls them. Idempotent."""
    if hasattr(os.fork, "__wrapped__"):
        return
    executes = _fork_exec_for(_posixsubprocess.fork_exec)
    _posixsubprocess.fork_exec = executes
    subprocess._fork_exec = executes  # type: ignore[attr-defined]
    os.posix_spawn = _posix_spawn_for(os.posix_spawn)
    os.posix_spawnp = _posix_spawn_for(os.posix_spawnp)
    os.fork = _fork_for(os.fork, lambda made: made)
    os.forkpty = _fork_for(os.forkpty, lambda made: made[0])
    os.system = _system_for(os.system)  # type: ignore[assignment]
    process = multiprocessing.process.BaseProcess
    process.start = _start_for(process.start)  # type: ignore[assignment,method-assign]
    threading.Thread.start = _thread_start_for(threading.Thread.start)  # type: ignore[assignment,method-assign]


def _fork_exec_for(usual: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(usual)
    def fork_exec(*arguments: Any) -> int:
        owner = _owner()
        if owner is None:
            return usual(*arguments)
        given: Iterable[bytes] | None = arguments[_ENVIRONMENT]
        if given is None:
            given = [name + b"=" + value for name, value in os.environb.items()]
        name = f"{MARK}=".encode()
        environment = [*(each for each in given if not each.startswith(name)), name + owner.mark().encode()]
        return usual(*arguments[:_ENVIRONMENT], environment, *arguments[_ENVIRONMENT + 1 :])

    return fork_exec


def _posix_spawn_for(usual: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(usual)
    def posix_spawn(path: Any, argv: Any, env: Mapping[Any, Any] | None, /, **more: Any) -> int:
        owner = _owner()
        if owner is not None:
            # None means this process's environment, from Python 3.13 on.
            env = {**(os.environ if env is None else env), MARK: owner.mark()}
        return usual(path, argv, env, **more)

    return posix_spawn


def _fork_for(usual: Callable[[], Any], pid_of: Callable[[Any], int]) -> Callable[[], Any]:
    @functools.wraps(usual)
    def fork() -> Any:
        owner = _owner()
        mark = "" if owner is None else owner.mark()
        made = usual()
        if owner is not None:
            if pid := pid_of(made):
                owner.forked(pid)
            else:
                # Marks the programs that the forked process executes.
                os.environ[MARK] = mark
        return made

    return fork


def _system_for(usual: Callable[[Any], int]) -> Callable[[Any], int]:
    @functools.wraps(usual)
    def system(command: Any) -> int:
        owner = _owner()
        if owner is None:
            return usual(command)
        return usual(f"export {MARK}={owner.mark()}\n".encode() + os.fsencode(command))

    return system


def _start_for(usual: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(usual)
    def start(self: multiprocessing.process.BaseProcess) -> None:
        owner = _owner()
        if owner is not None:
            owner.mark()
        usual(self)
        if owner is not None and self.pid is not None:
            # A process of the fork server has no mark.
            owner.forked(self.pid)

    return start


def _thread_start_for(usual: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(usual)
    def start(self: threading.Thread) -> None:
        found = caller()
        port = getattr(threading.current_thread(), _PORT, None) if found is None else found.port
        if port is not None:
            setattr(self, _PORT, port)
        usual(self)

    return start
