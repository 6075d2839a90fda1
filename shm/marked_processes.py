"""Processes that models start, as whoever has to end them finds them: by a mark in their environment, which is inherited.

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

#: In the environment of a worker.
MARK = "_TENSORD_MARK"
#: And of what one of its models starts.
MODEL_MARK = "_TENSORD_MODEL"
#: Looks for those that were started while one looked.
_MAX_LOOKS = 20
_INTERVAL = 0.02
#: For a supervisor that dies with its worker.
_SUPERVISOR_MS = 2000


class Found(NamedTuple):
    """A process; its number is its own only together with its start."""

    pid: int
    parent: int
    #: As the kernel counts it.
    started: str


def look(pid: int) -> Found | None:
    """A process that lives, or None."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, which may hold anything, stands in parentheses.
            state, parent, *rest = file.read().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else Found(pid, int(parent), rest[17])


def everybody() -> list[Found]:
    """All processes that live."""
    return [found for name in os.listdir("/proc") if name.isdigit() and (found := look(int(name))) is not None]


def has(found: Found, variable: bytes) -> bool:
    """Whether it was started with that variable, NAME=value, in its environment."""
    try:
        with open(f"/proc/{found.pid}/environ", "rb") as file:
            return variable in file.read().split(b"\0")
    except OSError:
        return False  # it is gone, or somebody else's


def send(found: Found, number: int) -> bool:
    """Sends it a signal. Returns whether it lived."""
    try:
        # Held before it is looked at again: its number may be another's by now.
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
    """Kills those with that variable until there is none. Returns how many there were."""
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
    # It started this process: where it is the parent no more, it has ended.
    _ended(_held(worker) if os.getppid() == worker else -1, None)
    if _ended(above, _SUPERVISOR_MS):
        kill_all(f"{MARK}={mark}".encode())


def _held(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _ended(process: int, timeout_ms: int | None) -> bool:
    """Waits for the end of a process that is held; -1: it had ended before. Returns whether it has."""
    if process < 0:
        return True
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(timeout_ms))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
