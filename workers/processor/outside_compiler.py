"""Has compile processes compile this process's programs: where JAX would call XLA's compiler, one of them is asked.

JAX traces, lowers and checks as ever; the module for the compiler goes to ``workers/compiling`` instead, and the executable that
comes back is loaded. JAX has no public hook for that: where its private function has moved, every program is compiled here.

Compiled here all the same: a program with callbacks into this process; one that a compile process refuses, so that the
error is JAX's own, or because it needs what only this process has, such as an FFI target of the model's. On GPUs everything: a
second process would need memory of the same GPU, and tune its kernels beside those that run there.
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
    """Has compile processes compile programs for several threads."""

    def __init__(self, compilers: Compilers) -> None:
        self._compilers = compilers
        self._hook = _hook()
        #: Whether this process can load executables of another one.
        self._loads = True

    @property
    def count(self) -> int:
        """How many programs are compiled at a time."""
        return self._compilers.count

    @contextlib.contextmanager
    def compiling(self, what: str, cancellation: Cancellation) -> Iterator[list[tuple[Any, bytes]]]:
        """Has programs of this thread compiled outside within the block. Yields the list of executables and their bytes.

        ``what``: for errors. Raises Internal: a compile process died.

        An executable cannot be serialised again: the result loads, and lacks functions when it is run (jaxlib 0.10.2).
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
        """Compiles one module outside. Returns None if it has to be compiled here. Raises CompilerDied, Cancelled."""
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
    """Makes a compiler with ``processes`` processes; "auto": one for every two cores, up to four. Returns None for 0.

    ``long_seconds``: as in ``Compilers``.
    """
    # XLA compiles with more than one thread itself.
    count = min(_MOST, max(1, len(os.sched_getaffinity(0)) // 2)) if processes == "auto" else processes
    return OutsideCompiler(Compilers(count, long_seconds)) if count else None


@functools.cache
def _hook() -> threading.local | None:
    """Patches JAX's compile function, once. Returns thread-local storage, whose ``compile`` is the thread's compiler."""
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
