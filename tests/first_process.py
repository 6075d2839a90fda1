"""Runs the first process, which tests' processes are forked off (``tests.prepared``), and turns a fork into a program."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import itertools
import json
import logging
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any, NoReturn

from tensord.daemon import check
from tensord.daemon.processes import spawned
from tests.prepared import Process, early

#: What takes long to import.
_MODULES = (
    "tensord.daemon.cli",
    "tensord.daemon.supervisor",
    "tensord.daemon.http.server",
    "tensord.daemon.grpc.server",
    "tensord.workers.check",
    "tensord.workers.loading.loader",
    "tensord.workers.worker",
    "tensord.workers.devices.device_cuda",
    "tensord.workers.imports.import_system",
)
#: The same for who uses the CUDA driver, which it does not open.
_CUDA_MODULES = ("cuda.bindings.driver", "cuda.bindings.runtime")
_ORDER_SIZE = 1 << 17
#: Above all that a process may have.
_NO_DESCRIPTOR = 1 << 20


def serve(orders: socket.socket) -> None:
    """Forks processes on the orders of pytest, until pytest has ended."""
    for module in _MODULES:
        importlib.import_module(module)
    with contextlib.suppress(ImportError):
        for module in _CUDA_MODULES:
            importlib.import_module(module)
    _say_platform_late()
    _work_out()
    gc.collect()
    gc.freeze()
    while True:
        text, fds, _, _ = socket.recv_fds(orders, _ORDER_SIZE, 64)
        if not text:
            return
        order = json.loads(text)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if pid := os.fork():
                os.write(writer, str(pid).encode())
                os._exit(0)
            # Only afterwards is its parent the one whose death it may ask to be told of.
            while os.getppid() == between:
                time.sleep(0.0005)
            if order["new_session"]:
                os.setsid()
            os.chdir(order["cwd"])
            placed = dict(zip(order["fds"], fds, strict=True))
            _become(order["words"], order["environment"], placed, [order["cwd"]])
        os.waitpid(between, 0)
        orders.send(os.read(reader, 64))
        for fd in (*fds, reader, writer):
            os.close(fd)


def _work_out() -> None:
    """Has what each process works out once when it begins worked out: flags, options, how records are read, patterns of paths."""
    from starlette.routing import compile_path

    from tensord.config import layers
    from tensord.daemon import flags
    from tensord.daemon.http.routes import Routes
    from tensord.shm import control_records
    from tensord.shm.record import decoder

    flags._options()
    layers.read()
    for union in (
        control_records.FromWorker,
        control_records.ToWorkerControl,
        control_records.ToFront,
        control_records.FromFront,
    ):
        decoder(union)
    nothing: Any = None
    routes = Routes(nothing, nothing)
    # A first compilation of JAX's asks each distribution whether it is a plugin, and imports these.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)  # type: ignore[assignment]
    importlib.metadata.entry_points(group="jax_plugins")
    for module in ("builtin", "mhlo"):
        importlib.import_module(f"jaxlib.mlir.dialects.{module}")
    for _, path, *_ in (*routes.table(), *routes.refused(), *routes.undescribed()):
        compile_path(path)


def _say_platform_late() -> None:
    """Makes workers set JAX's platforms in its configuration.

    They set it in their environment before they import JAX, which has been imported here already.
    """
    import jax

    from tensord.workers.devices.device import DeviceName

    prepare = DeviceName.prepare_environment

    def prepare_environment(name: DeviceName) -> None:
        prepare(name)
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

    DeviceName.prepare_environment = prepare_environment  # type: ignore[method-assign]


def _forked(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int | IO[bytes],
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> Any:
    """Replaces subprocess.Popen for a supervisor and ``tensord check``: forks the child where that gives the same process.

    A child has no standard input.
    """
    before, words = list(command[:3]), command[3:]
    if before != [sys.executable, "-P", "-m"] or early(env) != early(os.environ):
        return subprocess.Popen(
            command,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=start_new_session,
        )
    pid = os.fork()
    if pid == 0:
        if start_new_session:
            os.setsid()
        files = enumerate((stdin, stdout, stderr))
        standard = {number: number if file in (None, subprocess.DEVNULL) else file.fileno() for number, file in files}
        _become(words, env, standard | {fd: fd for fd in pass_fds})
    return Process(pid)


def _become(
    words: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int], folders: Sequence[str] = ()
) -> NoReturn:
    """Runs a module as the program of this process, or the text that follows "-c".

    ``fds``: number that each descriptor is to have -> descriptor. ``folders``: searched first for modules.
    """
    status = 1
    try:
        _forget()
        _place(fds)
        os.environ.clear()
        os.environ.update(environment)
        before = [*folders, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        sys.path[:] = [*before, *itertools.dropwhile(lambda path: not path.endswith(".zip"), sys.path)]
        is_text = words[0] == "-c"
        _rename([sys.executable, *words] if is_text else [sys.executable, "-m", *words])
        sys.argv = ["-c", *words[2:]] if is_text else list(words)
        spawned.subprocess = check.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _forked})
        try:
            if is_text:
                sys.modules["__main__"] = ModuleType("__main__")
                exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
            else:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _forget() -> None:
    """Removes what is left of the process that this one was forked off, so that it is as if it had been started."""
    # Nothing of it is ever finalized, which would close descriptors that are another's by then.
    gc.freeze()
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    asyncio._set_running_loop(None)
    asyncio.set_event_loop_policy(None)
    logging.getLogger().handlers.clear()


def _place(fds: Mapping[int, int]) -> None:
    """Gives descriptors their numbers and closes all others."""
    above = max(fds) + 1
    # One that was started would have no others, so that a limit which its parent has reached leaves it some.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for number, fd in fds.items()}
    for number, fd in copies.items():
        os.dup2(fd, number)
    following = 0
    for number in (*sorted(fds), _NO_DESCRIPTOR):
        if number > following:  # closerange takes none for all
            os.closerange(following, number)
        following = number + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def _rename(words: Sequence[str]) -> None:
    """Writes this process's command line over that of the first process, which is as long as any.

    The rest of the space is filled with slashes before the program.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[begin - end :].rjust(end - begin, b"/")
    ctypes.memmove(begin, text, len(text))


if __name__ == "__main__":
    # By its own name: each process that is forked has another module for its program.
    importlib.import_module("tests.first_process").serve(socket.socket(fileno=int(sys.argv[1])))
