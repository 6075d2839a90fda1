"""Implements the classification extension: an output is replaced by its largest elements, as ``value:index[:label]``.

Source: Triton docs/protocol/extension_classification.md; ties and number formats as observed.
"""

from __future__ import annotations

import numpy as np

from tensord.shm.arrays import Array, datatype_of
from tensord.shm.errors import InvalidArgument
from tensord.workers.tensors.signature import TensorSpec

#: Elements of one output that are told. The loop of a worker writes their texts, and serves nobody else meanwhile.
_MOST = 1 << 15


def classify(spec: TensorSpec, values: Array, count: int, batches: bool) -> Array:
    """Returns the ``count`` largest elements as strings "value:index" or "value:index:label" (the labels are in ``spec``).

    They are BYTES [k], or [batch, k] if the model batches, ordered from the largest; among equals the lower index comes first.

    Args:
      batches: whether the first dimension of ``values`` is the batch; then each row is classified for itself.
    Raises: InvalidArgument: the extension is not defined for the datatype, or more elements are asked for than are told.
    """
    datatype = datatype_of(values.dtype)
    if datatype is None or datatype in ("BYTES", "BOOL", "FP16", "BF16"):
        raise InvalidArgument(
            f"class result not available for output due to unsupported type '{datatype or values.dtype}'"
        )
    batches = batches and values.ndim > 0
    rows = values.reshape(values.shape[0], -1) if batches else values.reshape(1, -1)
    k = min(count, rows.shape[1])
    if len(rows) * k > _MOST:
        raise InvalidArgument(
            f"output '{spec.name}': {len(rows) * k} classes are asked for, at most {_MOST} of an output are told"
        )
    best = np.empty((len(rows), k), np.object_)
    for number, row in enumerate(rows):
        best[number] = [_text(spec, row, index) for index in _largest(row, k).tolist()]
    return best if batches else best.reshape(k)


def _largest(row: Array, count: int) -> Array:
    """Returns the indices of the ``count`` largest elements of a row, which are found without sorting all of a long one."""
    if 8 * count < len(row):
        known = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
        among = np.flatnonzero(known >= np.partition(known, -count)[-count])
        return among[_ordered(row[among])[:count]]
    return _ordered(row)[:count]


def _ordered(row: Array) -> Array:
    """Returns the indices of a row's elements, ordered from the largest value; NaN comes last.

    The values are not negated for this, because unsigned and extreme integers would wrap.
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
