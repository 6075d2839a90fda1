"""Sets JAX's 64-bit mode, which is set for each thread, for models that need it."""

from __future__ import annotations

import contextlib

from tensord.workers.jax_internals.wide import enable_x64
from tensord.workers.tensors.signature import Signature


def precision(signature: Signature) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which JAX's 64-bit mode is on if the model has 64-bit elements; otherwise it changes nothing."""
    return enable_x64(True) if signature.wide else contextlib.nullcontext()
