"""The core that the loop of a front or worker is kept on, where the supervisor names one (``lanes.apart``).

Only its thread is, not its process. A thread has the cores of the one that starts it: so what a loop needs is started before, and
what comes later takes the cores that the process had.
"""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)


def keep_on(core: int | None) -> None:
    """Keeps the calling thread on that core; None: where it is.

    One that the process has been denied meanwhile is not taken: whoever denied it (taskset, a CPU set) knew why.
    """
    if core is None:
        return
    if core not in os.sched_getaffinity(0):
        _log.warning("the loop is not kept on core %d: this process may not use it", core)
        return
    try:
        os.sched_setaffinity(0, (core,))
    except OSError as error:
        _log.warning("the loop is not kept on core %d: %s", core, error.strerror)
