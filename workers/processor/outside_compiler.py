"""Compiles this process's programs in other processes: takes the place of the function by which JAX calls XLA's compiler.

JAX traces, lowers and checks as usual; the module for the compiler goes to a compile process (``workers/compiling``), and the
executable that comes back is loaded. JAX has no public hook for that: if a JAX version has moved its private function, every
program is compiled in this process.

Some programs are compiled in this process in any case: a program with callbacks into this process; a program that a compile
process refuses, either so that the error comes from JAX, or because it needs something that only this process has, such as a
model's FFI target. On GPUs every program: another process would need memory of the same GPU, and its tuning of kernels would
compete with running ones.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax

from tensord.shm.errors import Internal
from tensord.workers.compiling.compilers import CompilerDied, Compilers
from tensord.workers.compiling.records import Compile, CompileRefused
from tensord.workers.devices.device_cpu import thread_count
from tensord.workers.jax_internals.interfaces import COMPILER, CUSTOM_CALLS, PICKLER, XLA_CLIENT, Missing
from tensord.workers.threads.cancellation import Cancellation

_log = logging.getLogger(__name__)
#: Bytes of a module; a larger one is compiled here.
_MAX_BYTE_SIZE = 1 << 30
#: Most processes where the configuration says "auto".
_MOST = 4


class OutsideCompiler:
    """Compiles the worker's programs in other processes (compile processes); several threads may use it at a time."""

    def __init__(self, compilers: Compilers) -> None:
        self._compilers = compilers
        self._hook = _hook()
        #: Whether this process can load executables that a compile process made.
        self._loads = True

    @property
    def count(self) -> int:
        """How many programs are compiled at a time: the number of compile processes."""
        return self._compilers.count

    @contextlib.contextmanager
    def compiling(self, what: str, cancellation: Cancellation) -> Iterator[list[tuple[Any, bytes]]]:
        """During the ``with`` block, programs that the calling thread compiles are compiled in other processes, if possible.

        Yields a list that gets each executable made so, with its bytes. They are needed to store it: an executable that is
        serialised again can be loaded, but then lacks functions when it is run (jaxlib 0.10.2).

        Args:
          what: names the program in errors.
          cancellation: tells whether the load was given up.
        Raises Internal: a compile process died; Cancelled: the load was given up.
        """
        made: list[tuple[Any, bytes]] = []
        if self._hook is None:
            yield made
            return
        self._hook.compile = functools.partial(self._compile, cancellation, made)
        try:
            yield made
        except CompilerDied as error:
            raise Internal(f"{what}: the process that compiled it {error}") from None
        finally:
            self._hook.compile = None

    def _compile(
        self,
        cancellation: Cancellation,
        made: list[tuple[Any, bytes]],
        backend: Any,
        module: Any,
        devices: Any,
        options: Any,
    ) -> Any:
        """Compiles one module in a compile process. Returns the loaded executable; None: the caller must compile it itself.

        Args:
          made: gets the executable and its bytes.
          backend, module, devices, options: what JAX passes to XLA's compiler.
        Raises CompilerDied: the compile process died; Cancelled: the load was given up.
        """
        text = io.BytesIO()
        module.operation.write_bytecode(text)
        if not self._loads or text.tell() > _MAX_BYTE_SIZE or backend.platform != "cpu":
            return None
        own = backend is jax.local_devices(backend="cpu")[0].client
        asked = Compile(
            text.getvalue(),
            options.SerializeAsString(),
            thread_count() if own else 1,
            len(backend.local_devices()),
            tuple(device.id for device in devices),
        )
        try:
            answer = self._compilers.compile(asked, cancellation)
        except OSError as error:
            _log.warning("no compile process can be started, programs are compiled in the worker: %s", error)
            return None
        if isinstance(answer, CompileRefused):
            _log.info("a compile process refused a program, which is compiled in the worker: %s", answer.reason)
            return None
        try:
            found = backend.deserialize_executable(answer.executable, executable_devices=devices)
        except Exception as error:  # whatever XLA says; the next one would not load either
            _log.warning(
                "programs are compiled in the worker, which cannot load what a compile process made: %s: %s",
                type(error).__name__,
                error,
            )
            self._loads = False
            return None
        made.append((found, answer.executable))
        return found

    def __repr__(self) -> str:
        return f"<OutsideCompiler of {self._compilers}>"


def outside_compiler(processes: int | Literal["auto"], long_seconds: float = 0.0) -> OutsideCompiler | None:
    """Makes a compiler that uses ``processes`` compile processes; "auto": one for every two cores, at most four.

    Returns None for 0 processes: the worker compiles its programs itself.

    ``long_seconds``: a program that has been compiled for so long does not count any more, and another one may begin; 0: all
    count.
    """
    # XLA compiles with more than one thread itself.
    count = min(_MOST, max(1, len(os.sched_getaffinity(0)) // 2)) if processes == "auto" else processes
    return OutsideCompiler(Compilers(count, long_seconds)) if count else None


@functools.cache
def _hook() -> threading.local | None:
    """Replaces JAX's compile function, once in a process, by one that first calls a function that the calling thread has set.

    Returns thread-local storage: a thread sets its function there as the attribute ``compile``. None: this JAX lacks the
    interfaces for it.
    """
    try:
        compiler = COMPILER.find()
        # Interfaces that the compile process needs, and that storing its executables needs.
        for needed in (PICKLER, XLA_CLIENT, CUSTOM_CALLS):
            needed.find()
    except Missing:  # said as the worker starts
        return None
    usual = compiler.backend_compile_and_load
    thread = threading.local()

    def backend_compile_and_load(
        backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Sequence[Any]
    ) -> Any:
        compile_outside = getattr(thread, "compile", None)
        if compile_outside is not None and not host_callbacks:
            found = compile_outside(backend, module, executable_devices, options)
            if found is not None:
                return found
        return usual(backend, module, executable_devices, options, host_callbacks)

    compiler.backend_compile_and_load = backend_compile_and_load
    return thread
