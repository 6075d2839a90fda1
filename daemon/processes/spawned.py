"""Starts the supervisor's child processes: fronts and workers.

``tensord.daemon.processes.child.Child.adopt`` takes over a process that was started. A child process that is not taken over
ends when the supervisor ends, or when the supervisor closes its socket to the child process.
Start child processes from the main thread only: if the thread that started a child ends, the kernel kills the child.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tensord import __version__
from tensord.config.options import Workers
from tensord.daemon.processes.devices import Device, find_devices
from tensord.shm import child_process
from tensord.shm.channel import pair
from tensord.shm.marked_processes import MARK

#: The module that a worker runs, as ``python -m`` takes it.
WORKER = "tensord.workers"


@dataclass(frozen=True, slots=True)
class Spawned:
    """A child process that was started, and its control channel.

    The owner must close the channel and wait for the process.
    """

    process: subprocess.Popen[bytes]
    #: Our end of its control channel.
    channel: socket.socket
    #: Memory into which it writes its stack when it dies; passed with Start.
    stack_fd: int
    #: The mark by which its own children are found (``Leftovers``); "": it starts none.
    mark: str = ""


def spawn(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> Spawned:
    """Starts ``python -m module`` as a child process.

    Args:
      arguments: the arguments of the program. The option ``--control-fd`` for a socket to this process is added.
      environment: variables that the child gets in addition to the variables that ``child_environment`` takes over.
      pass_fds: descriptors that the child inherits, under the same numbers.
    Raises OSError if no memory, process id or file descriptor is free.
    """
    ours, theirs = pair()
    stack_fd = -1
    try:
        stack_fd = child_process.create_stack_report()
        with child_process.group_signals_held():
            process = subprocess.Popen(
                # With -P nothing in the working directory is imported.
                [sys.executable, "-P", "-m", module, "--control-fd", str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *pass_fds),
                env=child_environment(environment),
            )
    except OSError:
        ours.close()
        if stack_fd >= 0:
            os.close(stack_fd)
        raise
    finally:
        theirs.close()
    return Spawned(process, ours, stack_fd, environment.get(MARK, ""))


def spawn_worker(module: str, device: Device) -> Spawned:
    """Starts a worker, which runs ``module`` on ``device``. Raises OSError if no memory, process id or descriptor is free."""
    words = ["--device", device.name, *(("--cores", device.cores) if device.cores else ())]
    return spawn(module, words, {**device.environment, MARK: secrets.token_hex(8)})


def spawn_workers(
    options: Workers, environment: Mapping[str, str], module: str = WORKER
) -> list[tuple[Device, Spawned]]:
    """Starts a worker process for each device that ``find_devices`` returns, and returns each device with its process.

    ``environment``: holds CUDA_VISIBLE_DEVICES. ``module``: the Python module that the workers run.
    Raises MissingDevice if a GPU or core that the options ask for cannot be used. Raises OSError if no memory, process id or
    file descriptor is free.
    """
    return [(device, spawn_worker(module, device)) for device in find_devices(options, environment)]


def end(workers: Collection[tuple[Device, Spawned]]) -> None:
    """Kills all ``workers``, waits until the processes are gone, and closes the file descriptors in ``Spawned``.

    Call it before a ``Child`` takes over any of them.
    """
    for _, worker in workers:
        worker.process.kill()
    for _, worker in workers:
        worker.process.wait()
        worker.channel.close()
        os.close(worker.stack_fd)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child process: the variables of this process except systemd's, and those in ``extra``.

    A variable with the version of tensord is added.
    """
    ours = {
        key: value
        for key, value in os.environ.items()
        if key not in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    }
    return ours | {child_process.VERSION_VARIABLE: __version__} | dict(extra)
