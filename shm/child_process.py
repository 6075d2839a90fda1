"""Settings that every child process of the daemon makes at its start, and an exit status that tells the supervisor a reason."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

#: A worker exits so when it can never use its device: another start would not help. Its last line in the log says why.
NO_DEVICE = os.EX_UNAVAILABLE
#: Signals that reach the whole process group, such as a terminal's Ctrl-C. The supervisor alone acts on them, and says when its
#: children stop.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def group_signals_held() -> Iterator[None]:
    """Blocks ``GROUP_SIGNALS`` in this thread. A child process that is started in the block has them blocked as well.

    So it does not die, with a stack trace, of one that comes while it imports its modules. It unblocks them when it has handlers,
    as ``ignore_group_signals`` does. Those that come to this thread are delivered after the block.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def ignore_group_signals() -> None:
    """Has this process, and what it starts, ignore ``GROUP_SIGNALS``, and unblocks them. Call it from the main thread."""
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies. Call it first of all, from the main thread.

    This is one of two independent safeguards, because each has a gap (measured). The kernel's signal comes within milliseconds,
    but also when only the parent's thread that started this process ends. End-of-file on the control channel comes with every
    death, but is noticed only while this process's loop runs.

    Raises: SystemExit: the parent was gone already.  OSError: the kernel refused.
    """
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before prctl took effect; an even earlier death is seen as end-of-file on the control channel.
    if os.getppid() != parent:
        raise SystemExit("tensord: the parent process is gone")


# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: The most glibc allows: larger blocks are mapped and unmapped one by one.
_LARGEST_HEAP_BLOCK = 32 << 20


def keep_freed_memory(byte_size: int) -> None:
    """Lets the allocator keep ``byte_size`` free bytes at its heap's end, and not return them to the kernel after a request.

    Whether glibc does so by itself depends on what else lies there. Where it does not, every large block is made of fresh pages:
    1 to 3 ms of a request with a 16 MiB output, 5 ms of one with a MiB of tensors as JSON both ways (measured). With any other C
    library this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, byte_size)
