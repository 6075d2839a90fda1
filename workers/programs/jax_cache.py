"""JAX's persistent compilation cache, kept in our directory: for programs that are not stored as whole executables.

Those are the shapes nobody planned, and what a model computes while it is made. JAX reads its own files without asking who wrote
them, and a program is code; so its cache is given our files to read and write. JAX has no public place for another cache: where
its private one has moved there is none (``PERSISTENT_CACHE``), and such programs are compiled at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterator

import jax

from tensord.workers.devices.device_cpu import thread_count
from tensord.workers.jax_internals.interfaces import PERSISTENT_CACHE, Missing
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.gpu_versions import gpu_versions

_log = logging.getLogger(__name__)


class JaxCache:
    """What JAX asks, by its own keys (``jax._src.compilation_cache_interface``). Used by several threads."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        # JAX's keys leave out the number of threads, for which a program is compiled, and most of what compiles for GPUs.
        self._variant = repr((thread_count(), gpu_versions()))
        self._thread = threading.local()

    @contextlib.contextmanager
    def passed_over(self) -> Iterator[None]:
        """What this thread compiles meanwhile is neither looked for nor kept."""
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
        """Keys begin with the name of a function, of any length."""
        return hashlib.sha256(f"{self._variant}\n{key}".encode()).hexdigest() + ".program"


def use_persistent_cache(directory: CacheDirectory | None) -> JaxCache | None:
    """Makes JAX keep every compilation there, however short; None: it keeps none."""
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
