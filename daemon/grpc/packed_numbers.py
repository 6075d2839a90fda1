"""Converts the numbers of an InferTensorContents to a numpy array, without a step in Python for each number. Sans-I/O.

Protobuf writes the numbers of a field one after the other. BOOL, FP32 and FP64 have the same bytes as in a raw tensor. Numbers
of the other datatypes are varints of 1 to 10 bytes.
Source: protobuf's encoding specification.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]

#: Bytes that are read at a time, so that what is made meanwhile stays in the processor's cache.
_STEP = 1 << 17
_MAX_VARINT = 10


def of_contents(contents: Any, dtype: np.dtype[Any]) -> Numbers:
    """Returns the numbers in ``contents``, an InferTensorContents, as an array of ``dtype``.

    The caller ensures that exactly one field of ``contents`` has values. ``dtype``: the datatype of that field.
    """
    contents.DiscardUnknownFields()
    written: bytes = contents.SerializeToString()
    at = 1
    while written[at] > 127:
        at += 1
    packed = np.frombuffer(written, np.uint8, offset=at + 1)
    if dtype.kind in "fb":
        return packed.view(dtype)
    return varints(packed).astype(dtype)


def varints(packed: npt.NDArray[np.uint8]) -> Numbers:
    """Decodes complete varints to unsigned integers, which have dtype uint8 if all are below 128, and else uint64."""
    if not len(packed) or packed.max() < 128:
        return packed
    pieces: list[Numbers] = []
    at = 0
    while at < len(packed):
        piece = packed[at : at + _STEP]
        ends = np.flatnonzero(piece < 128)
        starts = np.empty_like(ends)
        starts[0], starts[1:] = 0, ends[:-1] + 1
        pieces.append(_joined(piece, starts, ends))
        at += int(ends[-1]) + 1
    return np.concatenate(pieces)


def _joined(packed: npt.NDArray[np.uint8], starts: Numbers, ends: Numbers) -> Numbers:
    values = (packed[starts] & 127).astype(np.uint64)
    longer = np.flatnonzero(ends > starts)
    for place in range(1, _MAX_VARINT):
        if not len(longer):
            break
        bits = (packed[starts[longer] + place] & 127).astype(np.uint64)
        values[longer] |= bits << np.uint64(7 * place)
        longer = longer[ends[longer] > starts[longer] + place]
    return values
