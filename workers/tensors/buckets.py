"""Shape buckets: the few shapes that a model version is compiled for, and how a request is padded to one of them.

By default, the sizes of the batch axis are the powers of two up to max_batch_size, and max_batch_size itself. If an input is
ragged, max_batch_size is the only one. The author of a model may list other sizes as ``batch_buckets``, and sizes of named axes
as ``buckets``, for example ``buckets = {"sequence": (16, 32, 64)}``. If the sizes of an axis are given as "auto", they are the
powers of two, and a program for such a size is compiled when a request first needs the program. Axes without sizes are not
padded. For a ragged input, a size is the total length of all requests in a batch: a listed size, or else a power of two.

Padding is zeros. Outputs are sliced back to the size of the request.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.tensors.ragged import MOST, elements, unit, whole_shape
from tensord.workers.tensors.signature import Signature, TensorSpec

if TYPE_CHECKING:
    from tensord.workers.tensors.request_tensors import RequestTensors

#: Model-side shape of each input in signature order, without the batch dimension; None for an optional one that is absent.
Shapes = tuple[tuple[int, ...] | None, ...]
#: More executables than that are a mistake in a configuration, and would take minutes to compile.
MAX_EXECUTABLES = 512


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Returns all powers of two below ``limit``, and ``limit`` itself."""
    sizes = [1]
    while sizes[-1] * 2 < limit:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if limit == 1 else (*sizes, limit)


def check_sizes(what: str, sizes: object, limit: int = 1 << 31) -> tuple[int, ...]:
    """Returns ``sizes`` as a tuple. Raises InvalidArgument unless they are ascending integers from 1 to ``limit``.

    ``what`` names the sizes in the error.
    """
    if isinstance(sizes, Sequence) and all(type(size) is int for size in sizes) and sizes:
        ascending = all(a < b for a, b in itertools.pairwise(sizes))
        if ascending and sizes[0] >= 1 and sizes[-1] <= limit:
            return tuple(sizes)
    raise InvalidArgument(f"{what} is {sizes!r}; expected ascending whole numbers between 1 and {limit}")


@dataclass(frozen=True, slots=True)
class Buckets:
    """The batch sizes and axis sizes to which inputs of one model version are padded."""

    signature: Signature
    #: Ascending and ending with max_batch_size; (1,) for a model without a batch dimension.
    batch: tuple[int, ...]
    #: Axis name -> ascending sizes; none: powers of two.
    axes: Mapping[str, tuple[int, ...]]

    def rows(self, rows: int) -> int:
        """Returns the batch size to which ``rows`` rows are padded: the smallest bucket that is large enough. One must exist."""
        return self.batch[bisect.bisect_left(self.batch, rows)]

    @property
    def fixed(self) -> bool:
        """True if each input has only one possible shape, apart from the batch dimension."""
        return not self.signature.ragged and all(
            -1 not in spec.model_dims and not spec.optional for spec in self.signature.inputs.values()
        )

    def fitting(self, requests: Sequence[RequestTensors]) -> int:
        """Returns how many of ``requests``, from the first on, fit into the largest bucket of each ragged input: at least 1."""
        for spec in self.signature.inputs.values():
            sizes = self.axes.get(_ragged_axis(spec) or "", ()) if spec.ragged else ()
            units = 0
            for number, request in enumerate(requests):
                units += elements(request, spec.name) // unit(spec)
                if sizes and number and units > sizes[-1]:
                    requests = requests[:number]
                    break
        return len(requests)

    def settled(self, key: Shapes, requests: Sequence[RequestTensors]) -> tuple[int, Shapes]:
        """Returns the batch size and input shapes of the program that runs ``requests`` together. The model has ragged inputs.

        ``key``: what ``RequestShapes.key`` returns for each of the requests. A ragged input has the shape () in ``key``.
        """
        rows = self.rows(sum(request.rows for request in requests))
        shapes = list(key)
        for number, spec in enumerate(self.signature.inputs.values()):
            if not spec.whole or (spec.ragged and shapes[number] is None):
                continue
            source = self._source(spec)
            counts = [elements(request, source.name) for request in requests]
            units = self._units(source, sum(counts) // unit(source), rows)
            most = self._units(source, -(-max(counts) // unit(source)), rows) * unit(source)
            shapes[number] = whole_shape(spec, source, rows, units, most)
        return rows, tuple(shapes)

    def _units(self, spec: TensorSpec, count: int, rows: int) -> int:
        if -1 not in spec.model_dims:
            # No dim varies, so each row is one unit.
            return rows
        sizes = self.axes.get(_ragged_axis(spec) or "", ())
        at = bisect.bisect_left(sizes, count)
        return sizes[at] if at < len(sizes) else 1 << max(0, count - 1).bit_length()

    @property
    def named(self) -> tuple[str, ...]:
        """The names of all axes that vary and are padded."""
        specs = self.signature.inputs.values()
        return tuple(
            dict.fromkeys(axis for spec in specs for axis in spec.axes if axis is not None and axis in self.axes)
        )

    def padded(self, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape to which a tensor is padded.

        Dims without a bucket, or beyond the largest bucket, stay as they are.
        """
        return tuple(self._bucket(axis, size) for axis, size in zip(spec.axes, shape, strict=True))

    def _bucket(self, axis: str | None, size: int) -> int:
        sizes = self.axes.get(axis) if axis is not None else None
        if not sizes:
            return size if sizes is None else 1 << max(0, size - 1).bit_length()
        at = bisect.bisect_left(sizes, size)
        return sizes[at] if at < len(sizes) else size

    def planned(self) -> Iterator[tuple[int, Shapes]]:
        """Yields the rows and input shapes of each program to compile at load.

        Yields nothing if a varying axis has no buckets.
        """
        inputs = self.signature.inputs
        #: Axis -> its sizes; also name of a ragged input's largest request -> its sizes, where an input says how large that is.
        choices: dict[str, tuple[int, ...]] = {}
        for spec in inputs.values():
            if spec.of_batch is not None and spec.of_batch.kind != MOST:
                continue
            source = self._source(spec)
            if source.ragged and source.model_dims.count(-1) > 1:
                return
            for axis, dim in zip(source.axes, source.model_dims, strict=True):
                if dim == -1 and (axis is None or axis not in self.axes):
                    return
                if dim == -1 and axis is not None:
                    choices[axis if source is spec else _most_of(source)] = self.axes[axis]
        for sizes in itertools.product(*choices.values()):
            chosen = dict(zip(choices, sizes, strict=True))
            ragged = [spec for spec in inputs.values() if spec.ragged]
            # One request has no more than all of them.
            if any(chosen.get(_most_of(spec), 0) > chosen.get(_ragged_axis(spec) or "", 0) for spec in ragged):
                continue
            for rows in self.batch:
                yield rows, tuple(self._shape(spec, rows, chosen) for spec in inputs.values())

    def _source(self, spec: TensorSpec) -> TensorSpec:
        return spec if spec.of_batch is None else self.signature.inputs[spec.of_batch.source]

    def _shape(self, spec: TensorSpec, rows: int, chosen: Mapping[str, int]) -> tuple[int, ...]:
        if not spec.whole:
            return tuple(
                dim if dim != -1 else chosen[str(axis)] for axis, dim in zip(spec.axes, spec.model_dims, strict=True)
            )
        source = self._source(spec)
        units = chosen.get(_ragged_axis(source) or "", rows)
        return whole_shape(spec, source, rows, units, chosen.get(_most_of(source), units) * unit(source))


def _ragged_axis(spec: TensorSpec) -> str | None:
    names = [axis for axis, dim in zip(spec.axes, spec.model_dims, strict=True) if dim == -1]
    return names[0] if len(names) == 1 else None


def _most_of(spec: TensorSpec) -> str:
    return f"most of {spec.name}"


def sliced(spec: TensorSpec, shape: tuple[int, ...], lengths: Mapping[str, int]) -> tuple[slice, ...]:
    """Returns slices that cut the padding off an output, one slice for each axis except the batch axis.

    ``shape``: the padded output's shape without the batch axis. ``lengths``: the length of each named axis in the request.
    """
    return tuple(
        slice(None, lengths[axis]) if axis is not None and lengths.get(axis, size) < size else slice(None)
        for axis, size in zip(spec.axes, shape, strict=True)
    )


def shapes_key(arrays: Mapping[str, Array], signature: Signature) -> Hashable:
    """Returns the batching key of a request to a model that is not jitted. Requests with equal keys may share a batch."""
    batches, inputs = signature.batches, signature.inputs
    return tuple(
        (name, None if name in inputs and inputs[name].ragged else array.shape[1:] if batches else array.shape)
        for name, array in sorted(arrays.items())
    )


class RequestShapes:
    """Computes the padded shapes of requests to one model version, and the sizes of their named axes."""

    def __init__(self, signature: Signature, buckets: Buckets) -> None:
        self._signature = signature
        self._buckets = buckets
        self._fixed: Shapes | None = None
        if buckets.fixed:
            self._fixed = tuple(spec.model_dims for spec in signature.inputs.values())
        #: True if any axis has a name: such axes must agree, or are padded.
        self._named = any(axis is not None for spec in signature.inputs.values() for axis in spec.axes)

    def key(self, arrays: Mapping[str, Array]) -> Shapes:
        """Returns the padded shapes of a request's inputs. Requests with equal shapes can share a batch.

        Raises InvalidArgument: an axis has different sizes in two inputs.
        """
        if self._fixed is not None:
            return self._fixed
        if not self._named and not self._signature.ragged:
            lead = 1 if self._signature.batches else 0
            return tuple([arrays[name].shape[lead:] if name in arrays else None for name in self._signature.inputs])
        self.lengths(arrays)
        shapes: list[tuple[int, ...] | None] = []
        for spec in self._signature.inputs.values():
            array = arrays.get(spec.name)
            if array is None:
                shapes.append(None)
            elif spec.ragged:
                shapes.append(())
            else:
                shapes.append(self._buckets.padded(spec, array.shape[1:] if self._signature.batches else array.shape))
        return tuple(shapes)

    def lengths(self, arrays: Mapping[str, Array]) -> dict[str, int]:
        """Returns axis name -> size. Raises InvalidArgument: axes of the same name have different sizes."""
        lengths: dict[str, int] = {}
        for spec in self._signature.inputs.values():
            array = arrays.get(spec.name)
            if array is None:
                continue
            for axis, size in zip(spec.axes, array.shape[1:] if self._signature.batches else array.shape, strict=True):
                if axis is not None and lengths.setdefault(axis, size) != size:
                    raise InvalidArgument(
                        f"input '{spec.name}' of model '{self._signature.model}': axis '{axis}' has size {size}, "
                        f"{lengths[axis]} in another input"
                    )
        return lengths

    def __repr__(self) -> str:
        return f"<RequestShapes of {self._signature.model!r}>"
