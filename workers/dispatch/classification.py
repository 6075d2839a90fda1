"""Implements the classification extension: a tensor's largest elements as ``value:index[:label]``, in its place.

Source: Triton docs/protocol/extension_classification.md; ties and number formats as observed.
"""

from __future__ import annotations

import numpy as np

from tensord.shm.arrays import Array, datatype_of
from tensord.shm.errors import InvalidArgument
from tensord.workers.tensors.signature import TensorSpec


def classify(spec: TensorSpec, values: Array, count: int, batches: bool) -> Array:
    """Returns the ``count`` largest classes, largest first, the lower index first among equals: BYTES [k] or [batch, k].

    Raises: InvalidArgument: elements of that datatype have no order that anybody agreed on.
    """
    datatype = datatype_of(values.dtype)
    if datatype is None or datatype in ("BYTES", "BOOL", "FP16", "BF16"):
        raise InvalidArgument(
            f"class result not available for output due to unsupported type '{datatype or values.dtype}'"
        )
    batches = batches and values.ndim > 0
    rows = values.reshape(values.shape[0], -1) if batches else values.reshape(1, -1)
    k = min(count, rows.shape[1])
    best = np.empty((len(rows), k), np.object_)
    for number, row in enumerate(rows):
        best[number] = [_text(spec, row, index) for index in _largest(row)[:k].tolist()]
    return best if batches else best.reshape(k)


def _largest(row: Array) -> Array:
    """Returns indices, largest value first. It sorts the values themselves: negating would wrap unsigned and extreme integers.

    What is not a number is no class that anybody would choose: it comes last.
    """
    ascending = np.argsort(row[::-1], kind="stable")
    largest = len(row) - 1 - ascending[::-1]
    if row.dtype.kind != "f":
        return largest
    nameless = np.isnan(row[largest])
    return np.concatenate([largest[~nameless], largest[nameless]])


def _text(spec: TensorSpec, row: Array, index: int) -> bytes:
    value = row[index]
    text = f"{value:f}:{index}" if row.dtype.kind == "f" else f"{value}:{index}"
    label = spec.labels[index] if index < len(spec.labels) else ""
    return (f"{text}:{label}" if label else text).encode()
