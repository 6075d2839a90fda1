"""A compiled program as bytes, and back: the pickle of JAX's own, with XLA's executable as it was once serialised.

The second is no public part of JAX (``PICKLER``, ``UNLOADED_EXECUTABLE``). Where the first of these has moved nothing is
compiled in other processes (``outside_compiler``), because what they give could not be kept.
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
    """What ``jax.experimental.serialize_executable`` gives. Raises whatever that raises.

    Args:
      executable: XLA's, of a program that another process compiled: it cannot be serialised a second time. None: it can.
    """
    if executable is None:
        return tuple(serialize_executable.serialize(compiled))
    # As JAX does it, whose own function has no room for that.
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
    # JAX's own, which knows what of a compiled program is no ordinary object. Looked for when it is needed: without it a worker
    # does all the rest.
    usual: Any = PICKLER.find()

    class Pickler(usual):  # type: ignore[misc]
        def __init__(self, file: io.BytesIO, loaded: Any, executable: bytes) -> None:
            super().__init__(file)
            self._loaded = loaded
            self._executable = executable

        def persistent_id(self, obj: Any) -> Any:
            return ("exec", self._executable) if obj is self._loaded else super().persistent_id(obj)

    return Pickler
