"""Finds and ends the processes that models start, by a mark in their environment, which children inherit.

    _TENSORD_MARK    of a worker: what any of its models started, whatever became of parents, groups and sessions
    _TENSORD_MODEL   of one load of a model there

As a program, ``python marked_processes.py WORKER SUPERVISOR MARK``, it waits for a worker's end, and ends what that has left
behind if the supervisor, who does so otherwise, has ended as well. It imports nothing of ours, and costs next to nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import NamedTuple

#: The variable in the environment of a worker and of all that its models start.
MARK = "_TENSORD_MARK"
#: The variable in the environment of what one load of a model starts.
MODEL_MARK = "_TENSORD_MODEL"
#: Each look may miss processes that were started meanwhile, so there are several.
_MAX_LOOKS = 20
_INTERVAL = 0.02
#: How long a supervisor may take to die with its worker.
_SUPERVISOR_MS = 2000


class Found(NamedTuple):
    """Identifies a process: a pid is unique only together with its start time."""

    pid: int
    parent: int
    #: The start time as the kernel counts it.
    started: str


def look(pid: int) -> Found | None:
    """Returns the living process with that pid, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process's name, which may hold anything, stands in parentheses.
            state, parent, *rest = file.read().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else Found(pid, int(parent), rest[17])


def everybody() -> list[Found]:
    """Returns all living processes."""
    return [found for name in os.listdir("/proc") if name.isdigit() and (found := look(int(name))) is not None]


def has(found: Found, variable: bytes) -> bool:
    """Returns whether the process was started with that variable, NAME=value, in its environment."""
    try:
        with open(f"/proc/{found.pid}/environ", "rb") as file:
            return variable in file.read().split(b"\0")
    except OSError:
        return False  # it is gone, or somebody else's


def send(found: Found, number: int) -> bool:
    """Sends the process a signal. Returns whether it lived."""
    try:
        # The pidfd is opened before the second look: by now the pid may be another process's.
        held = os.pidfd_open(found.pid)
    except OSError:
        return False
    try:
        now = look(found.pid)
        if now is None or now.started != found.started:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(held, number)
        return True
    except OSError:
        return False  # somebody else's
    finally:
        os.close(held)


def kill_all(variable: bytes) -> int:
    """Kills processes with that variable until there is none. Returns how many there were."""
    killed: set[int] = set()
    for _ in range(_MAX_LOOKS):
        found = [each for each in everybody() if has(each, variable) and send(each, signal.SIGKILL)]
        if not found:
            break
        killed.update(each.pid for each in found)
        time.sleep(_INTERVAL)
    return len(killed)


def _main(worker: int, supervisor: int, mark: str) -> None:
    above = _held(supervisor)
    # The worker started this process: where it is the parent no more, it has ended.
    _ended(_held(worker) if os.getppid() == worker else -1, None)
    if _ended(above, _SUPERVISOR_MS):
        kill_all(f"{MARK}={mark}".encode())


def _held(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _ended(process: int, timeout_ms: int | None) -> bool:
    """Waits for the end of a process by its pidfd; -1: it had ended before. Returns whether it has ended."""
    if process < 0:
        return True
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(timeout_ms))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
