"""From arrays to a request inside the worker: looked at as closely as one that came on a lane, in the same words.

Its tensors are arrays that nobody can write to any more, so nothing of them is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

from msgspec.structs import replace

from tensord.shm.arrays import Array, datatype_of
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import PreparedRequest, PreparedTensor, RequestRecord
from tensord.workers.dispatch.input_checks import batch_size, check_names, check_tensor, model_shape
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.requests.familiar import Known
from tensord.workers.requests.inner_request import InnerRequest
from tensord.workers.requests.request import Request, Sink
from tensord.workers.requests.submitter import Submitter


def validate_inner(
    prepared: PreparedRequest,
    own: RequestRecord,
    arrays: Mapping[str, Array],
    outputs: Collection[str],
    submitter: Submitter[Request],
    version: ModelVersion,
    now_ns: int,
    sink: Sink,
    origin: Request | None = None,
) -> InnerRequest:
    """Raises ServingError: what is wrong, in a sentence for whoever made it.

    Args:
      prepared, own: say everything of it but its inputs and outputs.
      arrays: in the shapes that a client would send, as ``fitting`` makes them.
      origin: the request that it is made for, where there is one.
    """
    described = tuple([(name, datatype_of(array.dtype) or "", array.shape) for name, array in arrays.items()])
    known = version.familiar.find(described)
    if known is not None and not own.strikes:
        key, rows, taken = known.key, known.rows, dict(arrays)
    else:
        signature = version.signature
        prepared = replace(prepared, inputs=tuple([PreparedTensor(*each) for each in described]))
        check_names(prepared, own, signature)
        rows = (batch_size(prepared, own, signature) if signature.batches else 0) or 1
        for tensor in reversed(prepared.inputs):
            check_tensor(own, signature, tensor)
        specs = [signature.inputs[name] for name in arrays]
        taken = {
            spec.name: array.reshape(model_shape(signature, spec, array.shape)) if spec.reshaped else array
            for spec, array in zip(specs, arrays.values(), strict=True)
        }
        key = version.key(taken)
        if known is None and all(spec.plain for spec in signature.inputs.values()):
            sizes = [(array.dtype, array.nbytes) for array in taken.values()]
            version.familiar.learn(described, Known(key, rows, sizes))
        if own.strikes:
            key = key, own.request_id, submitter.peer
    for name in outputs:
        if name not in version.signature.outputs:
            raise InvalidArgument(f"unexpected inference output '{name}' for model '{version.name}'")
    return InnerRequest(version, submitter, prepared, own, key, rows, taken, outputs, now_ns, sink, origin)


def fitting(array: Array, dims: tuple[int, ...], batches: bool) -> Array:
    """A tensor for a model with those dims: as a batch of one where that batches, as the one row of it where that does not."""
    shape = array.shape
    if batches and len(shape) == len(dims):
        return cast(Array, array.reshape((1, *shape)))
    if not batches and len(shape) == len(dims) + 1 and shape[0] == 1:
        return cast(Array, array.reshape(shape[1:]))
    return array
