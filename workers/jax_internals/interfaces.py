"""Lists the private interfaces of JAX that a worker uses. A version of JAX may lack some of these interfaces.

A worker gives the same answers without these interfaces. ``missing()`` returns a sentence for each interface that JAX lacks.

No other code may import ``jax._src``, ``jax.interpreters`` or names of JAX that begin with an underscore. Two other modules may
import ``jaxlib``, only for its version and the path of its files (``tests/test_imports.py``).

``Interface.look`` is None if only compiling or running a program shows whether JAX has the interface. Code that uses such an
interface must treat every failure of the interface as if JAX lacked the interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Missing(Exception):
    """Raised if this version of JAX lacks a private interface. The message names the interface."""


@dataclass(frozen=True, slots=True)
class Interface:
    """A private interface of JAX: its name, what it is used for, and what happens if JAX lacks it."""

    name: str
    #: The versions of JAX that have it.
    versions: str
    #: The purpose that the interface serves here.
    purpose: str
    #: The consequence where the interface is missing.
    without: str
    #: Looks for it: ImportError, AttributeError where it is not there. None: it shows when a program is compiled or run.
    look: Callable[[], Any] | None

    def find(self) -> Any:
        """Returns a module, class or function of JAX. Raises Missing if JAX lacks the interface."""
        assert self.look is not None, f"{self.name} cannot be looked for"
        try:
            return self.look()
        except (ImportError, AttributeError) as error:
            raise Missing(f"{self.name}: {error}") from error


def _cache_module() -> Any:
    from jax._src import compilation_cache

    if not hasattr(compilation_cache, "_cache"):
        raise AttributeError("it has no such attribute")
    return compilation_cache


def _cpu_client() -> Any:
    from jax._src.xla_bridge import make_cpu_client

    return make_cpu_client


#: The parameters of ``batched_device_put`` that ``workers/devices/host_put.py`` passes by position, and the one that it names.
_PUT_ARGUMENTS, _PUT_NAMED = ["aval", "sharding", "xs", "devices", "committed"], "enable_x64"


def _batched_put() -> Any:
    from jax._src.core import ShapedArray
    from jax._src.interpreters.pxla import batched_device_put

    found = list(inspect.signature(batched_device_put).parameters)
    if found[: len(_PUT_ARGUMENTS)] != _PUT_ARGUMENTS or _PUT_NAMED not in found:
        raise AttributeError(f"it takes {', '.join(found)}")
    return batched_device_put, ShapedArray


PERSISTENT_CACHE = Interface(
    "jax._src.compilation_cache._cache",
    "0.8 to 0.12",
    "JAX's own cache of compiled programs is kept in our directory, which others cannot write to",
    "programs that nobody planned are compiled again at every start",
    _cache_module,
)
CPU_CLIENT = Interface(
    "jax._src.xla_bridge.make_cpu_client",
    "0.8 to 0.12",
    "small programs are computed by one thread",
    "every program gets all threads",
    _cpu_client,
)
OUTPUT_MEMORY = Interface(
    "jaxlib's calls of posix_memalign and free",
    "0.8 to 0.12",
    "outputs on a CPU are written where they are wanted",
    "outputs are copied to their places",
    None,
)
BUFFER_ASSIGNMENT = Interface(
    "serialized_buffer_assignment_proto of XLA's get_compiled_memory_stats",
    "0.10 to 0.12",
    "a program that leaves nothing but its outputs in their memory writes to a client's region by itself",
    "outputs are copied into clients' regions",
    None,
)
GPU_LIBRARIES = Interface(
    "jax_cuda12_plugin._versions, jax_cuda13_plugin._versions or jaxlib.cuda._versions",
    "0.8 to 0.12",
    "stored executables are good for the versions of NVIDIA's libraries that made them",
    "the versions of installed packages are compared, and the driver's",
    None,
)

BATCHED_PUT = Interface(
    "jax._src.interpreters.pxla.batched_device_put with enable_x64, and jax._src.core.ShapedArray",
    "0.10 to 0.12",
    "parameters in host memory become arrays of a processor in a tenth of the time",
    "parameter sets that come back to a processor take longer",
    _batched_put,
)

INTERFACES = (PERSISTENT_CACHE, CPU_CLIENT, OUTPUT_MEMORY, BUFFER_ASSIGNMENT, GPU_LIBRARIES, BATCHED_PUT)


def missing() -> tuple[str, ...]:
    """Returns a sentence for each of the ``INTERFACES`` that ``find`` does not find: what happens without this interface."""
    found = []
    for interface in INTERFACES:
        try:
            if interface.look is not None:
                interface.find()
        except Missing as error:
            found.append(f"{interface.without} ({error})")
    return tuple(found)
