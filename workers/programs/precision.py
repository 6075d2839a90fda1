"""64-bit mode, which JAX has for whole threads, for the models that want it."""

from __future__ import annotations

import contextlib

from tensord.workers.jax_internals.wide import enable_x64
from tensord.workers.tensors.signature import Signature


def precision(signature: Signature) -> contextlib.AbstractContextManager[object]:
    """64-bit mode for a model that speaks of 64-bit elements; everything else is traced and called without."""
    return enable_x64(True) if signature.wide else contextlib.nullcontext()
