"""Shape buckets: the few shapes a model version is compiled for, and how a request is padded into one.

    batch axis      powers of two up to max_batch_size, or what the model or its configuration lists
    named axes      buckets = {"sequence": (16, 32, 64)} in model.py
    other axes      as the request has them

Padding is zeros; outputs are sliced back to what the request brought.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shm.errors import InvalidArgument
from workers.tensors.signature import Signature, TensorSpec

#: Model-side shape of each input in signature order, without the batch dimension; None for an optional one that is absent.
Shapes = tuple[tuple[int, ...] | None, ...]
#: More executables than that are a mistake in a configuration, and would take minutes to compile.
MAX_EXECUTABLES = 512


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4 ... and ``limit`` itself."""
    sizes = [1]
    while sizes[-1] * 2 < limit:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if limit == 1 else (*sizes, limit)


def check_sizes(what: str, sizes: object, limit: int = 1 << 31) -> tuple[int, ...]:
    """Ascending whole numbers from 1 to ``limit``. Raises InvalidArgument."""
    if isinstance(sizes, Sequence) and all(type(size) is int for size in sizes) and sizes:
        ascending = all(a < b for a, b in itertools.pairwise(sizes))
        if ascending and sizes[0] >= 1 and sizes[-1] <= limit:
            return tuple(sizes)
    raise InvalidArgument(f"{what} is {sizes!r}; expected ascending whole numbers between 1 and {limit}")


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of one model version."""

    signature: Signature
    #: Ascending and ending with max_batch_size; (1,) for a model without a batch dimension.
    batch: tuple[int, ...]
    #: Axis name -> ascending sizes.
    axes: Mapping[str, tuple[int, ...]]

    def rows(self, rows: int) -> int:
        """The smallest batch bucket that holds so many rows."""
        return self.batch[bisect.bisect_left(self.batch, rows)]

    @property
    def fixed(self) -> bool:
        """Whether every input has one shape only."""
        return all(-1 not in spec.model_dims and not spec.optional for spec in self.signature.inputs.values())

    def padded(self, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The bucket a tensor of that shape goes into. Beyond the last bucket, and where there is none: the shape itself."""
        return tuple(self._bucket(axis, size) for axis, size in zip(spec.axes, shape, strict=True))

    def _bucket(self, axis: str | None, size: int) -> int:
        sizes = self.axes.get(axis, ()) if axis is not None else ()
        at = bisect.bisect_left(sizes, size)
        return sizes[at] if at < len(sizes) else size

    def planned(self) -> Iterator[Shapes]:
        """Every combination of shapes to compile before the version is ready; nothing where an axis has no buckets."""
        specs = list(self.signature.inputs.values())
        names: list[str] = []
        for spec in specs:
            for axis, dim in zip(spec.axes, spec.model_dims, strict=True):
                if dim == -1 and (axis is None or axis not in self.axes):
                    return
                if dim == -1 and axis is not None and axis not in names:
                    names.append(axis)
        for sizes in itertools.product(*(self.axes[name] for name in names)):
            chosen = dict(zip(names, sizes, strict=True))
            yield tuple(
                tuple(
                    dim if dim != -1 else chosen[str(axis)]
                    for axis, dim in zip(spec.axes, spec.model_dims, strict=True)
                )
                for spec in specs
            )


def sliced(spec: TensorSpec, shape: tuple[int, ...], lengths: Mapping[str, int]) -> tuple[slice, ...]:
    """What of a padded output, without the batch dimension, belongs to a request whose named axes have those lengths."""
    return tuple(
        slice(None, lengths[axis]) if axis is not None and lengths.get(axis, size) < size else slice(None)
        for axis, size in zip(spec.axes, shape, strict=True)
    )
