"""Switches JAX's 64-bit mode (64-bit elements in arrays) on or off for the calling thread."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental


def enable_x64(wanted: bool = True) -> contextlib.AbstractContextManager[object]:
    """Returns a context manager that switches JAX's 64-bit mode for the calling thread on, or off if ``wanted`` is False."""
    # Older versions have it among what is experimental.
    library: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    made: contextlib.AbstractContextManager[object] = library.enable_x64(wanted)
    return made


def precisions(wide: bool) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Returns a function that makes context managers. They turn JAX's 64-bit mode on if ``wide``, and do nothing otherwise."""
    return enable_x64 if wide else contextlib.nullcontext


def precision(wide: bool) -> contextlib.AbstractContextManager[object]:
    """Returns a context manager. It turns on JAX's 64-bit mode if ``wide`` is true, and does nothing if ``wide`` is false."""
    return precisions(wide)()


def byte_size_of(array: jax.Array) -> int:
    """Returns the number of bytes of an array, whether or not JAX's 64-bit mode is on."""
    # Outside of the mode ``nbytes`` of JAX 0.6 counts 64-bit elements as 32 bits.
    return math.prod(array.shape) * array.dtype.itemsize
