"""Compiles programs for the worker that started this process: ``python -m tensord.workers.compiling --fd N``.

The worker holds the other end of socket N. The process has XLA and nothing else: no jax, no model's code, no parameters, no
cache. Modules come in, executables go out. The process ends when it had no work for a while, and at once when its worker is gone,
also in the middle of a compilation.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import select
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tensord.shm import child_process
from tensord.shm.record import encoder
from tensord.workers.compiling.records import TO_PROCESS, Compile, Compiled, CompileRefused
from tensord.workers.jax_internals.interfaces import CUSTOM_CALLS, XLA_CLIENT

#: The process ends after so long without work, to give memory back. Starting another one takes a quarter of a second.
_IDLE_SECONDS = 2.0
#: Where memory runs out, the kernel ends this process before any other.
_OOM_SCORE = "1000"
#: Read by XLA when a client is made (``workers/devices/device_cpu.py``, which would bring numpy and more along).
_THREADS_VARIABLE = "PJRT_NPROC"


def main() -> None:
    child_process.end_if_other_version()
    # Sent to the whole group they would end a load; the worker says when.
    child_process.ignore_group_signals()
    parser = argparse.ArgumentParser(prog="tensord.workers.compiling", description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    connection = Connection(parser.parse_args().fd)
    threading.Thread(target=_end_with_worker, args=(connection.fileno(),), daemon=True).start()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    compiler = Compiler()
    try:
        while connection.poll(_IDLE_SECONDS):
            asked = TO_PROCESS.decode(connection.recv_bytes())
            connection.send_bytes(encoder.encode(compiler.compile(asked)))
    except (EOFError, OSError):
        pass  # the worker is gone
    # XLA's threads need no farewell.
    os._exit(0)


def _end_with_worker(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


class Compiler:
    """Compiles programs for the CPU with XLA in this process; keeps one XLA client for each number of threads and devices."""

    def __init__(self) -> None:
        self._clients: dict[tuple[int, int], Any] = {}

    def compile(self, asked: Compile) -> Compiled | CompileRefused:
        """Compiles one program for an XLA client with as many threads and devices as the worker's.

        Raises nothing: if compiling fails, the error is returned as a CompileRefused.
        """
        try:
            xla = _xla()
            client = self._client(xla, asked.threads, asked.device_count)
            devices = {device.id: device for device in client.local_devices()}
            made = client.compile_and_load(
                asked.module,
                xla.DeviceList(tuple(devices[number] for number in asked.devices)),
                xla.CompileOptions.ParseFromString(asked.options),
            )
            return Compiled(client.serialize_executable(made))
        except Exception as error:  # whatever XLA says to a program
            return CompileRefused(f"{type(error).__name__}: {error}")

    def _client(self, xla: Any, threads: int, device_count: int) -> Any:
        client = self._clients.get((threads, device_count))
        if client is None:
            os.environ[_THREADS_VARIABLE] = str(threads)
            client = xla.make_cpu_client(num_devices=device_count)
            self._clients[threads, device_count] = client
        return client


@functools.cache
def _xla() -> Any:
    xla_client = XLA_CLIENT.find()
    # Registers custom calls as jax does: LAPACK's are looked up when a program is compiled.
    for library in CUSTOM_CALLS.find():
        for platform, targets in library.registrations().items():
            for name, value, version in targets:
                xla_client.register_custom_call_target(name, value, platform=platform, api_version=version)
    return xla_client


if __name__ == "__main__":
    main()
