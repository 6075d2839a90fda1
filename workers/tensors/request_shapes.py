"""The shapes of a request to a jitted model: what they are after bucketing, and how large its named axes are."""

from __future__ import annotations

from collections.abc import Mapping

from tensord.shm.arrays import Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.tensors.buckets import Buckets, Shapes
from tensord.workers.tensors.signature import Signature


class RequestShapes:
    """Of one model version."""

    def __init__(self, signature: Signature, buckets: Buckets) -> None:
        self._signature = signature
        self._buckets = buckets
        self._fixed: Shapes | None = None
        if buckets.fixed:
            self._fixed = tuple(spec.model_dims for spec in signature.inputs.values())
        #: Whether shapes say more than themselves: axes that must agree, or that are padded.
        self._named = any(axis is not None for spec in signature.inputs.values() for axis in spec.axes)

    def key(self, arrays: Mapping[str, Array]) -> Shapes:
        """What requests must have in common to run together: the shapes after bucketing.

        Raises: InvalidArgument: axes of one name have different sizes.
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
        """Axis name -> size, as this request has it. Raises as ``key``."""
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
