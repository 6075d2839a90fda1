"""Switches JAX's 64-bit mode (64-bit elements in arrays) on for the calling thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import jax


def precisions(wide: bool) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Returns a function that makes context managers. They turn JAX's 64-bit mode on if ``wide``, and do nothing otherwise."""
    return functools.partial(jax.enable_x64, True) if wide else contextlib.nullcontext


def precision(wide: bool) -> contextlib.AbstractContextManager[object]:
    """Returns a context manager. It turns on JAX's 64-bit mode if ``wide`` is true, and does nothing if ``wide`` is false."""
    return precisions(wide)()
