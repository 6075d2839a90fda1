"""Functions with which a child process of the daemon sets itself up at its start, and the exit statuses of child processes.

An upgrade replaces the files of a running daemon, so a child process that starts afterwards would run the new version. Such a
child exits at once with the status ``OTHER_VERSION``, and the supervisor logs what the operator has to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import signal
import sys
from collections.abc import Iterator

from tensord import __version__

#: The variable by which a daemon tells its children, and these theirs, of which version it is.
VERSION_VARIABLE = "_TENSORD_VERSION"
#: The exit status of a child whose version is not the daemon's.
OTHER_VERSION = os.EX_CONFIG
#: A worker exits so when it can never use its device: another start would not help. Its last line in the log says why.
NO_DEVICE = os.EX_UNAVAILABLE
#: Signals that reach the whole process group, such as a terminal's Ctrl-C. The supervisor alone acts on them, and says when its
#: children stop.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def end_if_other_version() -> None:
    """Exits this process if its version of tensord differs from its daemon's. Call it before anything else.

    The exit status is ``OTHER_VERSION``. A message on standard error names both versions.
    """
    wanted = os.environ.get(VERSION_VARIABLE, __version__)
    if wanted != __version__:
        print(f"tensord: this process is of version {__version__}, its daemon of version {wanted}", file=sys.stderr)
        raise SystemExit(OTHER_VERSION)


@contextlib.contextmanager
def group_signals_held() -> Iterator[None]:
    """Blocks the signals in ``GROUP_SIGNALS``, such as SIGINT, in this thread within the ``with`` block.

    A child process that starts in the block inherits the blocked signals, and unblocks them with ``ignore_group_signals``.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def ignore_group_signals() -> None:
    """Makes this process and processes that it starts later ignore ``GROUP_SIGNALS``, such as SIGINT, and unblocks these signals.

    Call it from the main thread.
    """
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies. Call it early, from the main thread.

    The kernel also kills this process when the parent's thread that started it ends. Raises SystemExit if the parent is
    already gone, or OSError if the kernel refuses.
    """
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before prctl took effect; an even earlier death is seen as end-of-file on the control channel.
    if os.getppid() != parent:
        raise SystemExit("tensord: the parent process is gone")


def print_by_lines() -> None:
    """Makes standard output line-buffered, so that a model's output is not lost when its process dies."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: The largest block that glibc before 2.35 takes from its heap: larger ones are mapped and unmapped one by one.
_OLD_LARGEST_BLOCK = 32 << 20


def keep_freed_memory(byte_size: int) -> None:
    """Lets glibc keep ``byte_size`` free bytes of its heap instead of returning them to the kernel.

    Blocks of up to ``byte_size`` bytes then need no new pages. With any other C library this function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # New pages for every large block take 1 to 3 ms of a request with a 16 MiB output, and 12 of 19 ms of processor time
        # of a program for which XLA needs 33 MB in between (measured).
        if not mallopt(_M_MMAP_THRESHOLD, byte_size):
            mallopt(_M_MMAP_THRESHOLD, _OLD_LARGEST_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, byte_size)


def free_garbage() -> None:
    """Collects Python's garbage, and returns all free memory of glibc's heap to the kernel."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


#: Asks a child to write its stacks.
STACK_SIGNAL = signal.SIGUSR2
_MAX_STACK_BYTE_SIZE = 32 << 10


def create_stack_report() -> int:
    """Creates a memfd to which a child process can write its threads' stack traces when it dies. Returns the descriptor."""
    return os.memfd_create("tensord-stack", os.MFD_CLOEXEC)


def enable_stack_report(fd: int) -> None:
    """Makes this process write its threads' stacks to ``fd`` on a fatal signal or STACK_SIGNAL. ``fd`` must stay open."""
    faulthandler.enable(fd, all_threads=True)
    faulthandler.register(STACK_SIGNAL, fd, all_threads=True)


def read_stack_report(fd: int) -> list[str]:
    """Returns the lines of the stacks that a process wrote to ``fd``, at most 32 KiB. The list is empty if it wrote none."""
    text = os.pread(fd, _MAX_STACK_BYTE_SIZE, 0).decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]
