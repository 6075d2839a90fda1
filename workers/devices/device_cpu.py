"""Pins each CPU worker to some of the processor's cores, and sets the number of threads with which XLA computes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Sequence

from tensord.config import core_list

_log = logging.getLogger(__name__)

#: The number of threads; XLA reads it when a client starts.
THREADS_VARIABLE = "PJRT_NPROC"


def share_of_cores(cores: list[int], index: int, count: int) -> list[int]:
    """Divides ``cores`` evenly among ``count`` workers. Returns the cores of worker ``index``, at least one."""
    if count <= len(cores):
        return cores[index * len(cores) // count : (index + 1) * len(cores) // count]
    return [cores[index % len(cores)]]


def pin(index: int, count: int, lists: Sequence[str] = ()) -> None:
    """Pins this worker, number ``index`` of ``count``, to some of the cores. Call it before JAX's back end starts.

    ``lists`` has the cores of each worker as text, such as "0-3,8". If it is empty, workers get equal shares of the cores, and
    a single worker is not pinned.
    """
    if lists:
        cores = list(core_list.parse(lists[index]))
    elif count < 2:
        return
    else:
        cores = share_of_cores(sorted(os.sched_getaffinity(0)), index, count)
    pin_to(cores)


def pin_to(cores: Sequence[int]) -> None:
    """Restricts all threads of this process to these cores. If the system refuses, logs a warning."""
    try:
        # All threads, also those that importing numpy has started.
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), cores)
    except OSError as error:
        _log.warning("this worker is not pinned to cores %s: %s", core_list.describe(cores), error.strerror)


def limit_threads(threads: int) -> None:
    """Sets the number of threads with which XLA computes. If ``threads`` is 0, it stays the number of cores.

    Call it before JAX's back end starts.
    """
    # Of all settings that are said to set the number, jaxlib 0.10.2 obeys the process's affinity and PJRT_NPROC (and NPROC,
    # which other libraries read, too). It does not obey OMP_NUM_THREADS, nor --xla_cpu_multi_thread_eigen for kernels that are
    # not Eigen's, which nearly all are (measured). With 1, programs are not cut into parts.
    if threads:
        os.environ[THREADS_VARIABLE] = str(threads)


@functools.cache
def thread_count() -> int:
    """Returns the number of threads with which XLA computes in this process."""
    # Cached, because a model may change the environment later.
    for name in (THREADS_VARIABLE, "NPROC"):
        given = os.environ.get(name, "")
        if given.isdecimal() and int(given) > 0:
            return int(given)
    return len(os.sched_getaffinity(0))
