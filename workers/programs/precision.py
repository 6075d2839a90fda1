"""Sets JAX's 64-bit mode, which holds for a thread, for models that want it."""

from __future__ import annotations

import contextlib

from tensord.workers.jax_internals.wide import enable_x64
from tensord.workers.tensors.signature import Signature


def precision(signature: Signature) -> contextlib.AbstractContextManager[object]:
    """Returns a context in 64-bit mode for a model with 64-bit elements; others are traced and called without."""
    return enable_x64(True) if signature.wide else contextlib.nullcontext()
