"""Lets a dying process leave its stack: its interpreter writes it into memory that the supervisor still has afterwards.

    supervisor  create ─▶ the descriptor goes along with Start ─▶ the process is dead ─▶ read
    child       enable: a fatal signal, and ``STACK_SIGNAL`` of a supervisor that is about to kill it, write every thread's stack

Into memory and not to standard error, so that it stands in the log beside the process's name, whatever else is printed.
"""

from __future__ import annotations

import faulthandler
import os
import signal

#: Asks a child to write its stacks.
STACK_SIGNAL = signal.SIGUSR2
_MAX_BYTE_SIZE = 32 << 10


def create() -> int:
    """Creates nameless memory and returns its descriptor. Raises OSError: there is no descriptor for it."""
    return os.memfd_create("tensord-stack", os.MFD_CLOEXEC)


def enable(fd: int) -> None:
    """Lets this process write its stacks there from now on. The descriptor is never closed."""
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(STACK_SIGNAL, fd, all_threads=True)


def read(fd: int) -> list[str]:
    """Returns the first lines that a dead process wrote there; none where it ended in another way."""
    text = os.pread(fd, _MAX_BYTE_SIZE, 0).decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]
