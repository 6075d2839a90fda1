"""Compiled executables on disk, so that a second start neither traces nor compiles.

Beside JAX's persistent cache, which spares XLA's work but not the tracing, stand whole executables as JAX serialises them:

    <key>.executable    | magic 22 | sha256 of the rest 32 | pickle of (single thread?, payload, input tree, output tree) |

On which of a worker's devices a program runs stands in its entry, because it is decided by what only its compilation tells.

A pickle is code, so an entry is only ever read from a directory that is ours alone (owner and mode are checked), and only when
its digest is right. Entries are written under another name and renamed; a damaged one is removed, said in the log and made anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.monitoring
import jaxlib.version
from jax.experimental import serialize_executable

from workers.device_cpu import thread_count
from workers.models.gpu_versions import gpu_versions
from workers.models.placement import CompiledProgram, Placement
from workers.models.small_programs import SmallPrograms
from workers.single_thread import SingleThreadDevice

_log = logging.getLogger(__name__)
_MAGIC = b"tensord-executable-3\r\n"
_JAX_CACHE_HIT = "/jax/compilation_cache/cache_hits"
T = TypeVar("T")
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size


def cache_directory(configured: str) -> Path | None:
    """The directory for executables, made with mode 0700; None, with a warning, where there can be none.

    Args:
      configured: ``executables.cache_directory``; "" means systemd's cache directory, else the user's.
    """
    if configured:
        path = Path(configured)
    elif systemd := os.environ.get("CACHE_DIRECTORY"):
        path = Path(systemd.split(":")[0])
    else:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "tensord")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
        if found.st_uid != os.geteuid():
            raise PermissionError("it belongs to another user")
        if stat.S_IMODE(found.st_mode) & 0o077:
            # systemd makes CacheDirectory= 0755; it holds code that we run, so nobody else may write, nor need read.
            path.chmod(0o700)
    except (OSError, RuntimeError) as error:
        _log.warning("executables are not cached: directory %s cannot be used: %s", path, error)
        return None
    return path


def use_persistent_cache(directory: Path | None, single_thread: SingleThreadDevice | None = None) -> None:
    """Turns on JAX's own cache there, for every compilation however short."""
    if directory is None:
        return
    # JAX's key leaves out the number of threads, for which a program is compiled. The bound between one and several changes our
    # keys: what JAX then still answered we could not store, and would ask for at every start.
    max_flops = single_thread.max_flops if single_thread is not None else 0
    name = f"xla-{thread_count()}-{max_flops}"
    if versions := gpu_versions():
        # It leaves out most of these as well.
        name += "-" + hashlib.sha256(repr(versions).encode()).hexdigest()[:16]
    jax.config.update("jax_compilation_cache_dir", str(directory / name))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@functools.cache
def _platform() -> str:
    """What an executable depends on besides its program."""
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
    """Executables by the digest of everything they depend on. Used by several threads; the file system orders them."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        #: For tests and operators.
        self.hits = 0
        self.misses = 0
        #: Of the calling thread: how often JAX's own cache answered instead of the compiler.
        self._answered = threading.local()
        jax.monitoring.register_event_listener(self._heard)

    def _heard(self, event: str, **_: str | int) -> None:
        if event == _JAX_CACHE_HIT:
            self._answered.count = getattr(self._answered, "count", 0) + 1

    def compile(self, make: Callable[[], T]) -> tuple[T, bool]:
        """Runs a compilation. True: its executable may be stored.

        One that JAX's cache answered may not: serialised a second time it loads, and then lacks functions when it is run
        (measured with jaxlib 0.10.2 on CPU).
        """
        before = getattr(self._answered, "count", 0)
        made = make()
        return made, getattr(self._answered, "count", 0) == before

    @staticmethod
    def key(parts: Iterable[str | bytes]) -> str:
        """A file name for the executable that those parts, and this platform, determine."""
        digest = hashlib.sha256(_platform().encode())
        for part in parts:
            content = part.encode() if isinstance(part, str) else part
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
        return digest.hexdigest()

    def load(self, key: str, usual: Placement, small: SmallPrograms | None = None) -> CompiledProgram | None:
        """The executable of that key, or None: also where it is for the single-thread device, and ``small`` has none."""
        path = self._path(key)
        try:
            content = path.read_bytes() if path is not None else b""
        except OSError:
            content = b""
        if path is None or not content:
            self.misses += 1
            return None
        try:
            if (
                content[: len(_MAGIC)] != _MAGIC
                or hashlib.sha256(content[_HEAD:]).digest() != content[len(_MAGIC) : _HEAD]
            ):
                raise ValueError("the entry is damaged")
            single_thread, *program = pickle.loads(content[_HEAD:])
            placement = usual if not single_thread else None if small is None else small.open()
            found = None if placement is None else CompiledProgram(_loaded(program, placement.device), placement)
        except Exception as error:  # whatever a stale or damaged entry raises, the answer is to compile again
            _log.warning("removing cached executable %s: %s: %s", path.name, type(error).__name__, error)
            with contextlib.suppress(OSError):
                path.unlink()
            self.misses += 1
            return None
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def store(self, key: str, program: CompiledProgram) -> None:
        """Keeps an executable. What cannot be serialised, or a full disk, only costs the next start."""
        path = self._path(key)
        if path is None:
            return
        try:
            content = pickle.dumps(
                (program.placement.device is not None, *serialize_executable.serialize(program.call))
            )
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix="new-", delete=False) as file:
                try:
                    file.write(_MAGIC + hashlib.sha256(content).digest() + content)
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except Exception as error:
            _log.info("executable %s is not cached: %s: %s", path.name, type(error).__name__, error)

    def _path(self, key: str) -> Path | None:
        """Checked at every use: a directory that others can write to holds nothing we may run."""
        if self._directory is None:
            return None
        try:
            found = self._directory.stat()
        except OSError:
            return None
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            _log.warning("executables are not cached: the cache directory is open to other users")
            return None
        return self._directory / f"{key}.executable"


def _loaded(program: list[Any], device: jax.Device | None) -> jax.stages.Compiled:
    where = {} if device is None else {"backend": device.client, "execution_devices": [device]}
    made: jax.stages.Compiled = serialize_executable.deserialize_and_load(*program, **where)
    return made
