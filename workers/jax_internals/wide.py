"""Sets JAX's mode for 64-bit elements, which each thread has for itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental


def enable_x64(wanted: bool = True) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which JAX has 64-bit elements (``wanted``) or only smaller ones."""
    # Older versions have it among what is experimental.
    library: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    made: contextlib.AbstractContextManager[object] = library.enable_x64(wanted)
    return made


def precisions(wide: bool) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Returns a function that makes contexts with JAX's 64-bit mode on (``wide``), or contexts that change nothing."""
    return enable_x64 if wide else contextlib.nullcontext


def precision(wide: bool) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which JAX's 64-bit mode is on if a model needs it (``wide``); otherwise it changes nothing."""
    return precisions(wide)()


def byte_size_of(array: jax.Array) -> int:
    """Returns the bytes of an array.

    JAX 0.6's ``nbytes`` counts 64-bit elements as 32 bits outside of the mode for 64-bit elements.
    """
    return math.prod(array.shape) * array.dtype.itemsize
