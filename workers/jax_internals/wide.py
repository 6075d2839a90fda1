"""64-bit mode of JAX, for the thread that asks."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.experimental


def enable_x64(wanted: bool = True) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which JAX has 64-bit elements, or has none."""
    # Older versions have it among what is experimental.
    library: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    made: contextlib.AbstractContextManager[object] = library.enable_x64(wanted)
    return made
