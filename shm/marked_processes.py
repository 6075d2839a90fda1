"""Finds and kills processes that models have started. An environment variable, which child processes inherit, marks them:

    _TENSORD_MARK=WORKER         a worker, and processes that its models have forked. Each worker has its own text WORKER
    _TENSORD_MARK=WORKER.LOAD    a program that a model has started. Each loaded model of a worker has its own number LOAD

When a worker has died, ``kill_all`` with the text WORKER kills all processes that the worker's models have left running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import NamedTuple

from tensord.shm import descriptors

#: The variable in the environment of a worker and of all that its models start.
MARK = "_TENSORD_MARK"
#: Each look may miss processes that were started meanwhile, so there are several.
_MAX_LOOKS = 20
_INTERVAL = 0.02


class Found(NamedTuple):
    """A running process, identified by its pid and its start time."""

    pid: int
    parent: int
    #: The start time as the kernel counts it.
    started: str


def look(pid: int) -> Found | None:
    """Returns the running process with this pid, or None if there is none. Zombies do not count.

    Raises OSError if this process can open no more files, as the other functions of this module do.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process's name, which may hold anything, stands in parentheses.
            state, parent, *rest = file.read().decode(errors="replace").rpartition(")")[2].split()
    except OSError as error:
        _check_descriptors(error)
        return None
    return None if state in "ZX" else Found(pid, int(parent), rest[17])


def everybody() -> list[Found]:
    """Returns all running processes of the host."""
    return [found for name in os.listdir("/proc") if name.isdigit() and (found := look(int(name))) is not None]


def has(found: Found, mark: str) -> bool:
    """Returns whether the environment variable _TENSORD_MARK of the process ``found`` matches ``mark``.

    The variable matches if its value is ``mark``, or if its value begins with ``mark`` and a dot. Returns False if this process
    cannot read the environment of ``found``.
    """
    entry = f"{MARK}={mark}".encode()
    try:
        with open(f"/proc/{found.pid}/environ", "rb") as file:
            return any(each == entry or each.startswith(entry + b".") for each in file.read().split(b"\0"))
    except OSError as error:
        _check_descriptors(error)
        return False  # it is gone, or somebody else's


def send(found: Found, number: int) -> bool:
    """Sends the signal ``number`` to the process ``found``. Returns False if it has ended or belongs to another user."""
    try:
        # The pidfd is opened before the second look: by now the pid may be another process's.
        held = os.pidfd_open(found.pid)
    except OSError as error:
        _check_descriptors(error)
        return False
    try:
        now = look(found.pid)
        if now is None or now.started != found.started:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(held, number)
        return True
    except PermissionError:
        return False
    finally:
        os.close(held)


def _check_descriptors(error: OSError) -> None:
    if descriptors.lacked(error):
        raise error


def kill_all(mark: str) -> int:
    """Kills (SIGKILL) all processes for which ``has`` returns True for ``mark``. Returns how many it has killed.

    The search is repeated, at most 20 times, because a process may start another one before it is killed.
    """
    killed: set[int] = set()
    for _ in range(_MAX_LOOKS):
        found = [each for each in everybody() if has(each, mark) and send(each, signal.SIGKILL)]
        if not found:
            break
        killed.update(each.pid for each in found)
        time.sleep(_INTERVAL)
    return len(killed)
