"""A child that does not outlive its parent, however the parent dies.

Two independent cords, because each has a gap (measured): the kernel's parent-death signal fires within
milliseconds but is tied to the thread that spawned us; end-of-file on the control channel, which the child's loop watches,
works for every death but only when the loop turns.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Asks the kernel for SIGKILL at the parent's death. Call first thing, from the main thread.

    Raises: SystemExit: the parent was gone before we asked.
    """
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have died before prctl took effect; an even earlier death is seen as end-of-file on the control channel.
    if os.getppid() != parent:
        raise SystemExit("tensord: the parent process is gone")
