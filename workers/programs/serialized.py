"""Serialises compiled programs for the cache, also programs that were compiled in another process.

For the latter JAX's own pickler is used with the bytes of XLA's executable from that process. This is not a public part of JAX
(``PICKLER``, ``UNLOADED_EXECUTABLE``). If a JAX version has moved ``PICKLER``, nothing is compiled in other processes
(``outside_compiler``), because such programs could not be stored.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import serialize_executable

from tensord.workers.jax_internals.interfaces import PICKLER


def serialize(compiled: jax.stages.Compiled, executable: bytes | None = None) -> tuple[Any, ...]:
    """Serialises a program into the arguments of ``jax.experimental.serialize_executable.deserialize_and_load``.

    Raises ValueError: the program cannot be stored; or whatever JAX's ``serialize`` raises.

    Args:
      executable: the bytes of XLA's executable if another process compiled the program, because it cannot be serialised
        again; None: this process compiled it.
    """
    if executable is None:
        return tuple(serialize_executable.serialize(compiled))
    # Follows JAX's function, which takes no such bytes.
    inner: Any = compiled
    unloaded = inner._executable._unloaded_executable
    if inner._params.const_args or (unloaded.mut is not None and unloaded.mut.in_mut):
        raise ValueError("a program with constants or references of its own cannot be kept")
    leaves, tree = jax.tree.flatten(compiled.args_info)
    with io.BytesIO() as file:
        _pickler()(file, unloaded.xla_executable, executable).dump((unloaded, leaves, inner._no_kwargs))
        return file.getvalue(), tree, compiled.out_tree


@functools.cache
def _pickler() -> Callable[[io.BytesIO, Any, bytes], Any]:
    # JAX's own pickler knows the parts of a compiled program that are no ordinary objects. It is looked up when needed: a worker
    # can do without.
    usual: Any = PICKLER.find()

    class Pickler(usual):  # type: ignore[misc]
        def __init__(self, file: io.BytesIO, loaded: Any, executable: bytes) -> None:
            super().__init__(file)
            self._loaded = loaded
            self._executable = executable

        def persistent_id(self, obj: Any) -> Any:
            return ("exec", self._executable) if obj is self._loaded else super().persistent_id(obj)

    return Pickler
