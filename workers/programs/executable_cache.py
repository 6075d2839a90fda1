"""Caches compiled executables on disk, so that a worker that starts again need not compile them again.

    <key>.executable    an executable as JAX serialises it: a pickle of (where, payload, input tree, output tree)
                        where: True: the CPU device with one thread; False: another device; a tuple: the ids of several devices,
                        in the program's order
    <digest>.program    an entry of JAX's persistent compilation cache: JAX must trace the program again, but not compile it

A pickle can run code when it is loaded, and so can an executable. So a file is read only if no other user can have written it.

JAX's persistent cache has all other programs, such as those for shapes without a bucket and those that a model runs while it
is loaded. ``JaxCache`` keeps the entries in the same directory. If this JAX version does not let ``JaxCache`` do so, JAX
compiles these programs at every start.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable

from tensord.shm.figures import Compiles
from tensord.workers.devices.device_cpu import thread_count
from tensord.workers.jax_internals.interfaces import PERSISTENT_CACHE, Missing
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.gpu_programs import gpu_versions
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.threads.cancellation import Cancellation

if TYPE_CHECKING:
    from tensord.workers.processor.single_thread import SmallPrograms


_log = logging.getLogger(__name__)


class CompileCounts:
    """Counts programs that were compiled and programs that were found in the cache. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = self._ns = self._cache_hits = 0

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Counts one compilation, and the time spent in the block. Failed compilations count."""
        began_ns = time.monotonic_ns()
        try:
            yield
        finally:
            with self._lock:
                self._count += 1
                self._ns += time.monotonic_ns() - began_ns

    def found(self) -> None:
        with self._lock:
            self._cache_hits += 1

    def figures(self) -> Compiles:
        with self._lock:
            return Compiles(self._count, self._ns, self._cache_hits)

    def __repr__(self) -> str:
        return f"<CompileCounts {self.figures()}>"


def cache_directory(configured: str) -> CacheDirectory | None:
    """Opens the directory for executables, which only this user may access. Returns None, and logs a warning, if that fails.

    ``configured``: ``executables.cache_directory``; "": systemd's cache directory (CACHE_DIRECTORY) or, without one, the user's.
    """
    if configured:
        path = Path(configured)
    elif systemd := os.environ.get("CACHE_DIRECTORY"):
        path = Path(systemd.split(":")[0])
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tensord")
    try:
        return CacheDirectory(path.expanduser())
    except (OSError, RuntimeError) as error:
        _log.warning(
            "executables are not cached: directory %s cannot be used: %s; executables.cache_directory names another",
            os.path.expanduser(path),
            (isinstance(error, OSError) and error.strerror) or error,
        )
        return None


@functools.cache
def _platform() -> str:
    """Returns, as text, what an executable depends on besides its program: versions, device, flags and threads."""
    device = jax.devices()[0]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    except OSError:
        processor = []
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    threads = thread_count() if device.platform == "cpu" else 0
    versions = [jax.__version__, jaxlib.version.__version__, *gpu_versions()]
    return repr((versions, device.platform, device.device_kind, processor, flags, threads))


class ExecutableCache:
    """Stores executables in a cache directory, under a digest of everything that they depend on. Thread-safe."""

    def __init__(self, directory: CacheDirectory | None, programs: JaxCache | None = None) -> None:
        """Stores executables in ``directory``, unless it is None. ``programs``: JAX's own cache; None: JAX does not use one."""
        self._directory = directory
        self._programs = programs
        #: Counts compilations through this cache, and others that its users report.
        self.compiles = CompileCounts()

    def found_or_made(
        self,
        key: str,
        usual: Placement,
        small: SmallPrograms | None,
        what: str,
        make: Callable[[], CompiledProgram],
        cancellation: Cancellation,
    ) -> tuple[CompiledProgram, bool]:
        """Returns a program from the cache, or calls ``make`` and stores its result. Also returns whether ``make`` was called.

        If several workers share the cache's directory, one of them makes a program and the others wait for it.
        Args:
          usual: where the program runs, unless it was stored for the CPU device with one thread and ``small`` is given.
          small: opens that device. If it is None, programs that were stored for another device than ``usual`` are not used.
          what: names the program in the log.
        Raises Cancelled: the load was cancelled. Errors of ``make`` are raised unchanged.
        """
        cancellation.check()
        if (found := self.load(key, usual, small)) is not None:
            return found, False
        if self._directory is None:
            return self.make(key, what, make), True
        with self._directory.sole(_name(key), cancellation.check):
            found = self.load(key, usual, small)
            return (self.make(key, what, make), True) if found is None else (found, False)

    def make(self, key: str, what: str, make: Callable[[], CompiledProgram]) -> CompiledProgram:
        """Compiles a program by a call of ``make``, stores the program in the cache under ``key``, and returns the program.

        ``what``: the program's name in the log. Errors of ``make`` are raised unchanged.
        """
        # JAX's own cache is bypassed: an executable from it can be serialised again and loaded, but then lacks functions when
        # it is run (measured with jaxlib 0.10.2 on CPU).
        with (
            contextlib.nullcontext() if self._programs is None else self._programs.passed_over(),
            self.compiles.compiling(),
        ):
            program = make()
        return self.store(key, program, what)

    @staticmethod
    def key(parts: Iterable[str | bytes]) -> str:
        """Returns the key of an executable: a digest of this platform and of ``parts``, which determine the program."""
        digest = hashlib.sha256(_platform().encode())
        for part in parts:
            content = part.encode() if isinstance(part, str) else part
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
        return digest.hexdigest()

    def load(self, key: str, usual: Placement, small: SmallPrograms | None = None) -> CompiledProgram | None:
        """Loads a compiled program from the cache on disk. Returns None if the cache has no usable program under ``key``.

        ``usual``: the placement of most programs. ``small``: opens the CPU device with one thread, for programs that were
        compiled for it. If ``small`` is None, only programs that were compiled for the device of ``usual`` are loaded.
        """
        name = _name(key)
        if self._directory is None or (content := self._directory.read(name)) is None:
            return None
        try:
            where, *program = pickle.loads(content)
            here = usual.several is not None or where == usual.is_single_thread
            placement = usual if here else None if small is None else small.open()
            if placement is None:
                return None
            found = CompiledProgram(_loaded(program, placement, where), placement, len(content))
        except Exception as error:  # whatever a stale entry raises, the answer is to compile again
            self._directory.remove(name, error)
            return None
        self.compiles.found()
        return found

    def has(self, key: str) -> bool:
        """Returns whether the cache has an executable for a key. This process may be unable to load it."""
        return self._directory is not None and self._directory.read(_name(key)) is not None

    def store(self, key: str, program: CompiledProgram, what: str = "a program") -> CompiledProgram:
        """Writes a compiled program to the cache on disk. ``what``: the program's name in log messages.

        Returns a copy of ``program`` whose ``byte_size`` is the file's size. Returns ``program`` itself if nothing was written.
        """
        if self._directory is None:
            return program
        try:
            several = program.placement.several
            where = program.placement.is_single_thread if several is None else several.order(program.call)
            content = pickle.dumps((where, *serialize_executable.serialize(program.call)))
            self._directory.write(_name(key), content)
        except OSError as error:
            self._directory.say_unusable(error)
            return program
        except Exception as error:
            # A program that calls a Python function of this process cannot be stored.
            why = "it calls Python" if "callback" in str(error) else f"{type(error).__name__}: {error}"
            _log.info("%s is not cached, and is compiled at every start: %s", what, why)
            return program
        return program._replace(byte_size=len(content))

    def good_rows(self, key: str, *, found: bool = False) -> bool:
        """Returns whether the cache notes under ``key`` that a model's rows are independent. If ``found``, first notes this."""
        if self._directory is not None and found:
            with contextlib.suppress(OSError):
                self._directory.write(f"{key}.rows", b"good")
        return self._directory is not None and self._directory.read(f"{key}.rows") is not None


def text_of(lowered: jax.stages.Lowered) -> str:
    """Returns the text of a program and the names of its arguments, as a part of cache keys."""
    # An executable only takes arguments of the names that it was compiled for, which the program's text does not have.
    names = (jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(lowered.args_info))
    return "\n".join((lowered.as_text(), *names))


def _name(key: str) -> str:
    return f"{key}.executable"


def _loaded(program: list[Any], placement: Placement, where: bool | tuple[int, ...]) -> jax.stages.Compiled:
    # Devices are always given: else the program is loaded for all devices of its worker.
    on: dict[str, Any] = {"execution_devices": jax.local_devices()[:1]}
    if placement.is_single_thread:
        on = {"backend": placement.client, "execution_devices": [placement.device]}
    elif placement.several is not None:
        on = {"execution_devices": placement.several.ordered(where)}
    made: jax.stages.Compiled = serialize_executable.deserialize_and_load(*program, **on)
    return made


class JaxCache:
    """JAX's own compilation cache, in a cache directory. Thread-safe. Implements ``jax._src.compilation_cache_interface``."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        # JAX's keys leave out the number of threads, for which a program is compiled, and most of what compiles for GPUs.
        self._variant = repr((thread_count(), gpu_versions()))
        self._thread = threading.local()

    @contextlib.contextmanager
    def passed_over(self) -> Iterator[None]:
        """Bypasses this cache in the block: what the calling thread compiles is neither looked up nor stored."""
        self._thread.passed_over = True
        try:
            yield
        finally:
            self._thread.passed_over = False

    def get(self, key: str) -> bytes | None:
        return None if self._is_passed_over else self._directory.read(self._name(key))

    def put(self, key: str, value: bytes) -> None:
        if self._is_passed_over:
            return
        try:
            self._directory.write(self._name(key), value)
        except OSError as error:
            self._directory.say_unusable(error)

    @property
    def _is_passed_over(self) -> bool:
        return getattr(self._thread, "passed_over", False)

    def _name(self, key: str) -> str:
        # Hashed, because JAX begins a key with a function's name of any length.
        return hashlib.sha256(f"{self._variant}\n{key}".encode()).hexdigest() + ".program"


def use_persistent_cache(directory: CacheDirectory | None) -> JaxCache | None:
    """Makes JAX store compiled programs in ``directory``. Returns None if ``directory`` is None or this JAX version cannot."""
    if directory is None:
        return None
    try:
        compilation_cache = PERSISTENT_CACHE.find()
    except Missing:  # said as the worker starts
        return None
    made = JaxCache(directory)
    compilation_cache._cache = made
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return made
