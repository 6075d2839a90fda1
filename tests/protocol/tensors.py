"""Defines the one table of tensors that every way of sending them is tested with."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TENSORS: dict[str, Array] = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 1, 255], np.uint8),
    "UINT16": np.array([0, 1, 65535], np.uint16),
    "UINT32": np.array([0, 1, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 1, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 0, 127], np.int8),
    "INT16": np.array([-(2**15), 0, 2**15 - 1], np.int16),
    "INT32": np.array([-(2**31), 0, 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**40 + 5, 2**63 - 1], np.int64),
    "FP16": np.array([-1.5, 0.0, 65504.0], np.float16),
    "FP32": np.array([-1.5, 0.1, 3.4e38], np.float32),
    "FP64": np.array([-1.5, 0.1, 1.7e308], np.float64),
    "BF16": np.array([-1.5, 0.0, 3e38], ml_dtypes.bfloat16),
    "BYTES": np.array([b"", b"plain", "zweites \u00fc".encode()], np.object_),
}

#: Triton refuses FP16 and BF16 in JSON, and so do we: there is no agreed text form for them.
JSON_DATATYPES = sorted(set(TENSORS) - {"FP16", "BF16"})


def same(left: Array, right: Array) -> bool:
    """Returns whether two arrays are equal in datatype, shape and every bit."""
    if left.dtype == np.object_ or right.dtype == np.object_:
        return left.shape == right.shape and left.tolist() == right.tolist()
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
