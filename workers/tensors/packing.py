"""The tensors of a request side by side: one row for each dtype, where a program would take or give an array for each tensor.

    FP32    | a: 3 elements | b: 2 elements |
    INT64   | n: 1 element |

What a call of a program costs grows with the number of its arguments and results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Part(NamedTuple):
    """Where one tensor is."""

    name: str
    #: The number of its row.
    row: int
    #: In elements of the row.
    start: int
    stop: int
    shape: tuple[int, ...]


class Packing:
    """Which tensors are where."""

    __slots__ = ("parts", "rows")

    def __init__(self, tensors: Iterable[tuple[str, tuple[int, ...], np.dtype[Any]]]) -> None:
        """``tensors``: name, shape and dtype of each, in the order in which they stand."""
        numbers: dict[np.dtype[Any], int] = {}
        sizes: list[int] = []
        #: In the order they were given.
        self.parts: list[Part] = []
        for name, shape, dtype in tensors:
            number = numbers.setdefault(dtype, len(numbers))
            if number == len(sizes):
                sizes.append(0)
            start = sizes[number]
            sizes[number] += int(np.prod(shape, dtype=np.int64))
            self.parts.append(Part(name, number, start, sizes[number], shape))
        #: dtype and number of elements of each row.
        self.rows = list(zip(numbers, sizes, strict=True))

    def pack(self, tensors: Mapping[str, Any]) -> tuple[Any, ...]:
        """The rows; to be traced."""
        rows: list[list[Any]] = [[] for _ in self.rows]
        for part in self.parts:
            rows[part.row].append(jnp.ravel(tensors[part.name]))
        return tuple([jnp.concatenate(tensors_of_row) for tensors_of_row in rows])

    def unpack(self, rows: Any) -> dict[str, Any]:
        """The tensors in these rows, traced ones or numpy's; of numpy's they are views."""
        return {part.name: rows[part.row][part.start : part.stop].reshape(part.shape) for part in self.parts}

    def __repr__(self) -> str:
        return f"<Packing {len(self.parts)} tensors in {len(self.rows)} rows>"
