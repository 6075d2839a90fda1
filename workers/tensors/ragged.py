"""Ragged batching: requests whose inputs have different lengths share a batch.

    ragged input  | elements of request 0 | elements of request 1 | elements of request 2 | zeros |

A ragged input has one dimension in a batch. If the model is jitted, the input is padded with zeros to a bucket.
A batch input is an input that the worker computes, for example the number of elements of each request in a ragged input.
A batch output is split among the requests. Each request gets an array of the same shape as the request's ragged input.
Triton's model_config.proto defines batch inputs as BatchInput, and batch outputs as BatchOutput.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from tensord.config.model_config import ModelConfig, data_type_name
from tensord.protocol import model_config_pb2
from tensord.shm import datatypes
from tensord.shm.arrays import DTYPES, Array
from tensord.shm.errors import InvalidArgument
from tensord.workers.tensors.signature import BatchInput, Signature, TensorSpec

if TYPE_CHECKING:
    from tensord.workers.tensors.request_tensors import RequestTensors

#: A kind that Triton lacks: for each element of the source (of its dims that vary), the number of its row of the batch. Padding
#: has the number behind the last row.
SEGMENT_IDS = "SEGMENT_IDS"
_COUNT, _ENDS, _BOUNDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
)
#: The one kind whose shape depends on the requests in a batch.
MOST = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
_ITEM_SHAPE, _ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN"


def elements(request: RequestTensors, name: str) -> int:
    """Returns how many elements a request has in the input ``name``; 0: the request leaves the input out."""
    array = request.arrays.get(name)
    return 0 if array is None else math.prod(array.shape)


def unit(spec: TensorSpec) -> int:
    """Returns the product of an input's fixed dimensions, such as 12 for an input of the dimensions [-1, 3, 4]."""
    return math.prod(dim for dim in spec.model_dims if dim != -1)


def flat(array: Array) -> Array:
    return array.reshape((math.prod(array.shape),))


def whole_shape(spec: TensorSpec, source: TensorSpec, rows: int, units: int, most: int) -> tuple[int, ...]:
    """Returns the shape of the input ``spec`` for a whole batch. If the batch is padded, all numbers include the padding.

    Args:
      spec: a ragged input, or an input that the worker computes from a ragged input, such as the length of each request.
      source: the ragged input from which the worker computes ``spec``. If ``spec`` itself is ragged, ``source`` is ``spec``.
      rows: the number of rows in the batch.
      units: the number of elements of ``source`` in the batch, divided by the product of the fixed dims of ``source``.
      most: the number of elements of ``source`` in the request that has the most elements.
    """
    if spec.of_batch is None:
        return (units * unit(spec),)
    rank = len(source.model_dims)
    shapes = {
        _BOUNDS: (rows + 1,),
        MOST: (most,),
        _ITEM_SHAPE: (rows, rank),
        _ITEM_SHAPE_FLATTEN: (rows * rank,),
        SEGMENT_IDS: (units,),
    }
    return shapes.get(spec.of_batch.kind, (rows,))


def batch_input(
    spec: TensorSpec, source: TensorSpec, shape: tuple[int, ...], rows: int, requests: Sequence[RequestTensors]
) -> Array:
    """Computes an input that describes a batch, for instance by the number of elements of each request.

    ``spec``: declares the computed input. ``source``: the ragged input that the computed input describes. ``shape``: the shape
    of the returned array. ``rows``: the number of rows in the batch, with padding. ``requests``: the requests of the batch.
    """
    assert spec.of_batch is not None
    kind, name = spec.of_batch.kind, source.name
    counts = [elements(request, name) for request in requests]
    made = np.zeros(shape, spec.dtype)
    match kind:
        case "BATCH_ELEMENT_COUNT":
            made[: len(counts)] = counts
        case "BATCH_ACCUMULATED_ELEMENT_COUNT" | "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
            first = kind == _BOUNDS
            made[first : first + len(counts)] = np.cumsum(counts)
            made[first + len(counts) :] = sum(counts)
        case "BATCH_ITEM_SHAPE" | "BATCH_ITEM_SHAPE_FLATTEN":
            items = [request.arrays[name].shape[1:] for request in requests for _ in range(request.rows)]
            content: Array = np.array(items).reshape(-1)
            made.reshape(-1)[: content.size] = content
        case "SEGMENT_IDS":
            each = [
                count // unit(source) // request.rows
                for request, count in zip(requests, counts, strict=True)
                for _ in range(request.rows)
            ]
            made[:] = rows
            made[: sum(each)] = np.repeat(np.arange(len(each)), each)
    return made


def cut(output: Array, source: TensorSpec, requests: Sequence[RequestTensors]) -> list[Array]:
    """Splits a batch's output into an array for each request, in the shape of the client's array for the input ``source``."""
    content = np.asarray(output).reshape(-1)
    parts: list[Array] = []
    at = 0
    for request in requests:
        shape = request.arrays[source.name].shape
        count = math.prod(shape)
        parts.append(content[at : at + count].reshape(shape[:1] + source.to_client(shape[1:])))
        at += count
    return parts


# ---------------------------------------------------------------------------------------------------------- declaration


def declare_ragged(config: ModelConfig, module: ModuleType) -> dict[str, str]:
    """Adds the declarations of model.py about ragged inputs to a configuration.

    Returns a dict: each input that is declared to hold segment ids -> the ragged input that it describes.
    Raises InvalidArgument: a declaration is malformed, or contradicts the configuration.
    """
    what, types = f"model '{config.name}'", model_config_pb2
    inputs = {tensor.name: tensor for tensor in config.input}
    for name in _declared(what, module, "ragged", (list, tuple, set, frozenset)):
        if name not in inputs:
            raise InvalidArgument(f"{what}: ragged of model.py names {name!r}, which is no input")
        inputs[name].allow_ragged_batch = True
    known = {target: tensor for tensor in config.batch_input for target in tensor.target_name}
    segments: dict[str, str] = {}
    kinds = (*types.BatchInput.Kind.keys(), SEGMENT_IDS)
    for name, given in _declared(what, module, "batch_inputs", Mapping).items():
        match given:
            case (str(kind), str(datatype), str(source)) if kind in kinds and datatype in ("INT32", "FP32"):
                pass
            case _:
                raise InvalidArgument(
                    f"{what}: batch input '{name}' is declared as {given!r}; expected a kind ({', '.join(kinds)}), "
                    "INT32 or FP32, and the ragged input that it tells of"
                )
        if kind == SEGMENT_IDS:
            if datatype != "INT32":
                raise InvalidArgument(f"{what}: batch input '{name}': {SEGMENT_IDS} are INT32, {datatype} is declared")
            segments[str(name)] = source
            continue
        made = types.BatchInput(
            kind=kind, target_name=[name], data_type=datatypes.to_model_config(datatype), source_input=[source]
        )
        if name in known:
            if (known[name].kind, known[name].data_type, *known[name].source_input) != (
                made.kind,
                made.data_type,
                source,
            ):
                raise InvalidArgument(f"{what}: batch input '{name}' is another one in config.pbtxt than in model.py")
        else:
            config.batch_input.append(made)
    cuts = {target: list(tensor.source_input) for tensor in config.batch_output for target in tensor.target_name}
    for name, source in _declared(what, module, "batch_outputs", Mapping).items():
        if cuts.setdefault(name, [source]) != [source]:
            raise InvalidArgument(f"{what}: batch output '{name}' is another one in config.pbtxt than in model.py")
        if all(name not in tensor.target_name for tensor in config.batch_output):
            config.batch_output.add(target_name=[name], source_input=[source])
    return segments


def _declared(what: str, module: ModuleType, name: str, kind: Any) -> Any:
    given: Any = getattr(module, name, {} if kind is Mapping else ())
    if not isinstance(given, kind):
        expected = "a dict" if kind is Mapping else "a tuple of names"
        raise InvalidArgument(f"{what}: {name} of model.py is {given!r}, {expected} is expected")
    return given


def ragged_signature(described: Signature, config: ModelConfig, segments: Mapping[str, str]) -> Signature:
    """Returns a copy of the model signature ``described`` with the batch inputs and batch outputs that ``config`` declares.

    A batch input describes a batch to the model, for example by the number of elements that each request has in a ragged input.
    A batch output holds the results of all requests in a batch, one behind the other. ``segments``: the names of further batch
    inputs, each with the name of a ragged input. Such a batch input holds, for each element along the varying dims of the
    ragged input, the number of the element's row in the batch.
    Raises InvalidArgument if ``config`` is inconsistent, for example if a batch input describes an input that is not ragged.
    """
    what, kinds = f"model '{described.model}'", model_config_pb2.BatchInput.Kind
    made = [
        (target, kinds.Name(field.kind), datatypes.from_model_config(data_type_name(field)), field.source_input[0])
        for field in config.batch_input
        for target in field.target_name
    ]
    made += [(target, SEGMENT_IDS, "INT32", source) for target, source in segments.items()]
    specs: dict[str, TensorSpec] = {}
    for name, kind, datatype, source in made:
        if name in described.inputs or name in specs:
            raise InvalidArgument(f"{what}: batch input '{name}' is an input as well, or another batch input")
        _check_source(f"{what}: batch input '{name}'", described, source)
        specs[name] = TensorSpec(
            name, datatype, DTYPES[datatype], (-1,), (-1,), (None,), of_batch=BatchInput(kind, source)
        )
    outputs = dict(described.outputs)
    for field in config.batch_output:
        for name in field.target_name:
            outputs[name] = _cut_like(what, described, outputs[name], field.source_input[0])
    if not described.batches and any(tensor.allow_ragged_batch for tensor in config.input):
        raise InvalidArgument(f"{what}: allow_ragged_batch needs a max_batch_size above 0")
    dense = {axis for spec in described.inputs.values() if not spec.ragged for axis in spec.axes if axis is not None}
    for spec in described.inputs.values():
        for axis in spec.axes if spec.ragged else ():
            if axis in dense:
                raise InvalidArgument(
                    f"{what}: axis '{axis}' of ragged input '{spec.name}' is of an input that is not ragged"
                )
    return replace(described, inputs={**described.inputs, **specs}, outputs=outputs)


def _check_source(what: str, described: Signature, source: str) -> TensorSpec:
    spec = described.inputs.get(source)
    if spec is None or not spec.ragged:
        raise InvalidArgument(f"{what} tells of '{source}', which is no input with allow_ragged_batch")
    if spec.optional:
        raise InvalidArgument(f"{what} tells of '{source}', which is optional: there may be nothing to tell")
    return spec


def _cut_like(what: str, described: Signature, output: TensorSpec, source: str) -> TensorSpec:
    spec = _check_source(f"{what}: batch output '{output.name}'", described, source)
    if output.reshaped:
        raise InvalidArgument(
            f"{what}: batch output '{output.name}' has the shape of '{source}', it cannot be reshaped"
        )
    fits = len(output.dims) == len(spec.dims) and all(a in (b, -1) for a, b in zip(output.dims, spec.dims, strict=True))
    if not fits:
        raise InvalidArgument(
            f"{what}: batch output '{output.name}' has dims {list(output.dims)}, and is cut like '{source}', "
            f"which has {list(spec.dims)}"
        )
    return replace(output, cut_like=source)
