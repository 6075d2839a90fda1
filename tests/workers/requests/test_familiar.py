"""Remembered inputs: found again when they are the same, bounded in number."""

from __future__ import annotations

import numpy as np

from tensord.workers.requests.familiar import Familiar, Known


def test_only_the_very_same_inputs_are_familiar() -> None:
    familiar = Familiar()
    known = Known("key", 1, [(np.dtype(np.float32), 8)])
    familiar.learn((("x", "FP32", (2,)),), known)
    assert familiar.find((("x", "FP32", (2,)),)) is known
    for other in ((("x", "FP32", (3,)),), (("x", "INT32", (2,)),), (("y", "FP32", (2,)),), ()):
        assert familiar.find(other) is None


def test_shapes_without_end_are_forgotten() -> None:
    familiar = Familiar()
    for size in range(10_000):
        familiar.learn((("x", "FP32", (size,)),), Known(size, 1, []))
    assert familiar.find((("x", "FP32", (9_999,)),)) is not None
    assert familiar.find((("x", "FP32", (0,)),)) is None
