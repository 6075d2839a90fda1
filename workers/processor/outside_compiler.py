"""Compilations of this process that are done in another one: where JAX would call XLA's compiler, a compile process is asked.

JAX traces, lowers and checks as ever; what it would give to the compiler goes to ``workers/compiling`` instead, and what comes
back is loaded. JAX has no public place for that: where its private one has moved, every program is compiled here.

What is compiled here all the same: a program with callbacks into this process; one that a compile process refuses, so that the
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
from tensord.workers.compiling.records import Compile, Refused
from tensord.workers.devices.device_cpu import thread_count
from tensord.workers.jax_internals.interfaces import COMPILER, CUSTOM_CALLS, PICKLER, XLA_CLIENT, Missing
from tensord.workers.threads.cancellation import Cancellation

_log = logging.getLogger(__name__)
#: One that is larger is not sent around.
_MAX_BYTE_SIZE = 1 << 30
#: Where nobody says how many.
_MOST = 4


class OutsideCompiler:
    """Used by several threads."""

    def __init__(self, compilers: Compilers) -> None:
        self._compilers = compilers
        self._hook = _hook()
        #: This process can load what another one compiled.
        self._loads = True

    @property
    def count(self) -> int:
        """Programs that are compiled at a time."""
        return self._compilers.count

    @contextlib.contextmanager
    def compiling(self, what: str, cancellation: Cancellation) -> Iterator[list[tuple[Any, bytes]]]:
        """What this thread compiles meanwhile is compiled outside, and listed: XLA's executable, and as it was serialised.

        ``what``: for errors. Raises Internal: the process that compiled it died.

        It cannot be serialised a second time: that gives one which loads, and lacks functions when it is run (jaxlib 0.10.2).
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
        """None: it has to be compiled here. Raises CompilerDied; Cancelled: nobody wants it any more."""
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
        if isinstance(answer, Refused):
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
    """With so many processes; "auto": one for every two cores, up to four. None: there are to be none.

    ``long_seconds``: as of ``Compilers``.
    """
    # XLA compiles with more than one thread itself.
    count = min(_MOST, max(1, len(os.sched_getaffinity(0)) // 2)) if processes == "auto" else processes
    return OutsideCompiler(Compilers(count, long_seconds)) if count else None


@functools.cache
def _hook() -> threading.local | None:
    """Once for a process, in JAX's place: ``compile`` of it is who compiles for a thread."""
    try:
        compiler = COMPILER.find()
        # What the compile process needs, and what stores that which it makes.
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
