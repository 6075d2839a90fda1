"""Lets a process that crashes or is about to be killed write its stacks into memory that the supervisor reads afterwards.

    supervisor  create ─▶ the descriptor goes along with Start ─▶ the process is dead ─▶ read
    child       enable: a fatal signal, and ``STACK_SIGNAL`` of a supervisor that is about to kill it, write every thread's stack

The stacks go into memory and not to standard error, so that the log can show them with the process's name, whatever else the
process prints.
"""

from __future__ import annotations

import faulthandler
import os
import signal

#: Asks a child to write its stacks.
STACK_SIGNAL = signal.SIGUSR2
_MAX_BYTE_SIZE = 32 << 10


def create() -> int:
    """Creates nameless memory to which a process can write its threads' stacks; returns its descriptor.

    Raises OSError: this process has no descriptor left.
    """
    return os.memfd_create("tensord-stack", os.MFD_CLOEXEC)


def enable(fd: int) -> None:
    """Arranges for this process to write its threads' stacks to ``fd`` on a fatal signal or STACK_SIGNAL.

    ``fd`` must stay open.
    """
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(STACK_SIGNAL, fd, all_threads=True)


def read(fd: int) -> list[str]:
    """Returns the lines of the stacks that a process wrote to ``fd`` before it died, at most 32 KiB; empty if it wrote none."""
    text = os.pread(fd, _MAX_BYTE_SIZE, 0).decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]
