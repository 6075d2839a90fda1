"""Stores JAX's persistent compilation cache in the worker's cache directory.

It serves programs that ``executable_cache`` does not store: programs for shapes without a bucket, and programs that a model runs
while it is loaded. JAX reads the files of its cache without checking who wrote them, and a program is code; so JAX is given this
cache, which checks its files. JAX has no public hook for that: if a JAX version has moved its private attribute
(``PERSISTENT_CACHE``), such programs are compiled at every start.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import jax

from tensord.workers.devices.device_cpu import thread_count
from tensord.workers.jax_internals.interfaces import PERSISTENT_CACHE, Missing
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.gpu_programs import gpu_versions


class JaxCache:
    """A cache directory in which JAX stores and finds compiled programs by its own keys; any thread may use it.

    It has the methods of ``jax._src.compilation_cache_interface``.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        # JAX's keys leave out the number of threads, for which a program is compiled, and most of what compiles for GPUs.
        self._variant = repr((thread_count(), gpu_versions()))
        self._thread = threading.local()

    @contextlib.contextmanager
    def passed_over(self) -> Iterator[None]:
        """Bypasses this cache during the ``with`` block: what the calling thread compiles is neither looked up nor stored."""
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
        """Returns the file name for a key of JAX. The key is hashed because it begins with a function's name of any length."""
        return hashlib.sha256(f"{self._variant}\n{key}".encode()).hexdigest() + ".program"


def use_persistent_cache(directory: CacheDirectory | None) -> JaxCache | None:
    """Tells JAX to store every compiled program in a directory, however short the compilation was.

    Returns the cache; None if there is no directory or this JAX version does not allow it.
    """
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
