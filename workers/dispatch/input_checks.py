"""What can be wrong in the names, number, datatypes and shapes of a request's inputs, in Triton's words.

The order of checks is Triton's: the last input of the request first, as its hash table hands them out.
"""

from __future__ import annotations

from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import PreparedRequest, PreparedTensor, RequestRecord
from tensord.workers.requests.request import label
from tensord.workers.tensors.signature import Signature, TensorSpec

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each input "
    "shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def check_names(prepared: PreparedRequest, own: RequestRecord, signature: Signature) -> None:
    """Each input once, none too many, none missing."""
    given = [tensor.name for tensor in prepared.inputs]
    for position, name in enumerate(given):
        if name in given[:position]:
            raise InvalidArgument(f"{label(own.client_id)}input '{name}' already exists in request")
    required, most = signature.required, len(signature.inputs)
    if not required <= len(given) <= most:
        raise _wrong_count(prepared, own, signature, given)
    for name in reversed(given):
        if name not in signature.inputs:
            raise InvalidArgument(f"unexpected inference input '{name}' for model '{signature.model}'")
    if any(not spec.optional and spec.name not in given for spec in signature.inputs.values()):
        raise _wrong_count(prepared, own, signature, given)


def _wrong_count(prepared: PreparedRequest, own: RequestRecord, signature: Signature, given: list[str]) -> ServingError:
    required, most = signature.required, len(signature.inputs)
    expected = (
        f"expected {most} inputs" if required == most else f"expected number of inputs between {required} and {most}"
    )
    missing = [spec.name for spec in signature.inputs.values() if spec.name not in given and not spec.optional]
    # A misspelt input of generate is one.
    named = f" Its parameters are [{_quoted([*prepared.parameters])}]." if missing and prepared.parameters else ""
    return InvalidArgument(
        f"{label(own.client_id)}{expected} but got {len(prepared.inputs)} inputs for model '{signature.model}'. "
        f"Got input(s) [{_quoted(given[::-1])}], but missing required input(s) [{_quoted(missing)}]. "
        f"Please provide all required input(s).{named}"
    )


def _quoted(names: list[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def batch_size(prepared: PreparedRequest, own: RequestRecord, signature: Signature) -> int:
    """The one batch size of all inputs."""
    rows: int | None = None
    for tensor in reversed(prepared.inputs):
        if not tensor.shape:
            raise InvalidArgument(
                f"{label(own.client_id)}input '{tensor.name}' has no shape but model requires batch dimension "
                f"for '{signature.model}'"
            )
        if rows is not None and tensor.shape[0] != rows:
            raise InvalidArgument(
                f"{label(own.client_id)}input '{tensor.name}' batch size does not match other inputs for '{signature.model}'"
            )
        rows = tensor.shape[0]
    rows = 1 if rows is None else rows  # only a model whose inputs are all optional gets here without any
    if rows > signature.max_batch_size:
        raise InvalidArgument(
            f"{label(own.client_id)}inference request batch-size must be <= {signature.max_batch_size} for '{signature.model}'"
        )
    if rows < 1:
        raise InvalidArgument(
            f"{label(own.client_id)}inference request batch-size must be at least 1 for '{signature.model}', got {rows}"
        )
    return rows


def check_tensor(own: RequestRecord, signature: Signature, tensor: PreparedTensor) -> None:
    """Its datatype and its shape. Raises InvalidArgument."""
    spec, shape = signature.inputs[tensor.name], tensor.shape
    if tensor.datatype != spec.datatype:
        raise InvalidArgument(
            f"{label(own.client_id)}inference input '{spec.name}' data-type is '{tensor.datatype}', "
            f"but model '{signature.model}' expects '{spec.datatype}'"
        )
    if not spec.fits(shape[1:] if signature.batches else shape):
        raise _unexpected_shape(own, signature, spec, shape)


def model_shape(signature: Signature, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which the model takes a tensor of that shape."""
    lead = shape[:1] if signature.batches else ()
    return lead + spec.to_model(shape[len(lead) :])


def _unexpected_shape(
    own: RequestRecord, signature: Signature, spec: TensorSpec, shape: tuple[int, ...]
) -> ServingError:
    dims = (-1, *spec.dims) if signature.batches else spec.dims
    return InvalidArgument(
        f"{label(own.client_id)}unexpected shape for input '{spec.name}' for model '{signature.model}'. "
        f"Expected {_dims(dims)}, got {_dims(shape)}. {_BATCH_NOTE if signature.batches else ''}"
    )


def _dims(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"
