"""Validates requests in a worker before they are queued. A refused request holds no lease.

Inputs with the same names, datatypes and shapes are checked once for each load of the model version. The bytes of the inputs
are checked for each request. Error messages and the order of checks are Triton's: first regions and requested outputs, then
names and number of the inputs, then the batch size, then datatype, shape and bytes of each input. The inputs' batch sizes,
datatypes, shapes and bytes are checked from the last input of the request to the first.

Numeric inputs are not copied. BOOL inputs are copied. BYTES inputs are copied before they are checked, so that a client cannot
change them meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from tensord.shm.arrays import Array, IncompleteString, datatype_of, received_strings
from tensord.shm.common.scheduling import PARAMETERS, SET_PARAMETER
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.datatypes import ELEMENT_SIZES, MAX_ELEMENTS, OPEN, check_shape, closed, elements
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.messages import (
    TELLING_PARAMETER,
    PreparedRequest,
    PreparedTensor,
    RequestedOutput,
    RequestRecord,
    Slice,
    all_parameters,
    placed,
)
from tensord.shm.operations import MAIN_SET
from tensord.shm.regions import Region, check_range
from tensord.workers.devices.late_tensor import CudaTensor, LateTensor, RegionTensor
from tensord.workers.regions.lane_segments import LaneSegments
from tensord.workers.regions.region_table import AnyRegion, RegionTable
from tensord.workers.requests.preparation import INLINE, Checked, Preparation
from tensord.workers.requests.request import InnerRequest, Request, Sink
from tensord.workers.scheduling.queue import SetKey
from tensord.workers.tensors.request_tensors import label
from tensord.workers.tensors.signature import Signature, TensorSpec

if TYPE_CHECKING:
    from tensord.workers.models.model_version import ModelVersion
    from tensord.workers.requests.submitter_link import SubmitterLink

#: Datatypes whose tensors are copied before they are used, wherever they lie.
_COPIED = ("BYTES", "BOOL")
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each input "
    "shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)

Content = bytes | memoryview | LateTensor


# ------------------------------------------------------------------------------------------------------------- requests


def validate(
    own: RequestRecord,
    preparation: Preparation,
    submitter: SubmitterLink[Request],
    version: ModelVersion,
    regions: RegionTable | LaneSegments,
    now_ns: int,
) -> Request:
    """Validates a received record, and returns the request. The request holds leases of the regions that it names.

    Args:
      own: the received record.
      preparation: the prepared part of the request, with the results of earlier checks of this part.
      submitter: the sender of the request.
      version: the model version that is to run the request.
      regions: the regions that the request may name.
      now_ns: the current time of CLOCK_MONOTONIC.
    Raises ServingError: the request is invalid. The message is for the client, and no region stays leased.
    """
    prepared, signature = preparation.prepared, version.signature
    if submitter.segments is not None and preparation.load is None:
        # Fronts check this before they send.
        for tensor in prepared.inputs:
            check_shape(tensor.shape, f"{label(own.client_id)}input '{tensor.name}' shape")
    if own.replace_key:
        _check_replace_key(own)
    known = preparation.load is version.checked
    checked, outputs = (preparation.checked, preparation.outputs) if known else (None, None)
    leased: list[AnyRegion] = []
    try:
        # What a front of Triton looks at comes first, then what its core does.
        if preparation.own and len(own.contents) == len(prepared.inputs):
            contents: list[Content] = [
                place if type(place) is bytes else submitter.lane.view(cast(Slice, place)) for place in own.contents
            ]
        else:
            contents = _contents(prepared, own, submitter, regions, leased)
        if checked is None:
            prepared = _with_known_shape(prepared, own, contents)
        if outputs is None:
            outputs = _outputs(prepared, own, signature, regions, leased) if prepared.outputs else {}
        if checked is None:
            checked = _check(prepared.inputs, prepared, own, version, contents)
        arrays: dict[str, Array] | None = None
        named: dict[str, Content] | None = None
        copied = 0
        if checked.plain and [*map(len, contents)] == checked.sizes:
            named = dict(zip([tensor.name for tensor in prepared.inputs], contents, strict=True))
            if leased:
                _give_types(named, prepared, checked)
        else:
            arrays = _arrays(prepared, own, signature, contents)
            for tensor, content in zip(prepared.inputs, contents, strict=True):
                copied += len(content) if tensor.datatype in _COPIED else 0
        if not known:
            if prepared.parameters and (parameters := version.loaded.known_parameters) is not None:
                parameters.check(prepared.parameters, label(own.client_id))
            preparation.learn(version.checked, checked if prepared is preparation.prepared else None, outputs)
        key, repeats = checked.key, preparation.number != INLINE and preparation.checked is not None
        name = _chosen(own, version) if own.parameter_set else None
        tells = _tells(prepared, own, version) if prepared.parameters else False
        if name is not None:
            key = _key_of(version, key, name)
        if own.strikes:
            # A request under which a worker has died runs alone, so that it cannot take others with it.
            key, repeats = (key, own.request_id, submitter.peer), False
        request = Request(
            version,
            submitter,
            prepared,
            own,
            key,
            checked.rows,
            arrays,
            outputs,
            leased,
            now_ns,
            copied,
            named,
            preparation if repeats else None,
        )
        if name is not None or tells:
            request.chosen, request.tells = name, tells
        return request
    except BaseException:
        for region in leased:
            region.unlease()
        raise


def _chosen(record: RequestRecord, version: ModelVersion) -> str | None:
    """Returns the name of the request's parameter set; None: it is ``main``."""
    name, sets = record.parameter_set, version.sets
    _check_size(record, SET_PARAMETER, name)
    if sets is None or name == MAIN_SET:
        return None
    sets.find(name)
    return name


def _tells(prepared: PreparedRequest, record: RequestRecord, version: ModelVersion) -> bool:
    sets, tells = version.sets, prepared.parameters.get(TELLING_PARAMETER)
    if sets is None:
        return False
    if SET_PARAMETER in prepared.parameters:
        raise InvalidArgument(f"{label(record.client_id)}'{SET_PARAMETER}' is a field of the request, and no parameter")
    if tells is not None and type(tells) is not bool:
        raise InvalidArgument(
            f"{label(record.client_id)}parameter '{TELLING_PARAMETER}' is {tells!r}, true or false is expected"
        )
    if tells:
        sets.told = True
    return bool(tells)


def _key_of(version: ModelVersion, key: Hashable, name: str) -> Hashable:
    """Adds the parameter set ``name`` to the batching key ``key``, unless batches may mix parameter sets."""
    assert version.sets is not None
    # The planner of sequences knows their sets, and a stack has room for all of a batch.
    mixes = version.sequences is not None or version.sets.stack is not None
    return key if mixes else SetKey(key, name)


def _check_replace_key(record: RequestRecord) -> None:
    _check_size(record, "tensord_replace", record.replace_key)
    if record.sequence_id:
        raise InvalidArgument(
            f"{label(record.client_id)}parameter 'tensord_replace' is given with a sequence, whose requests cannot be replaced"
        )


def _check_size(record: RequestRecord, parameter: str, value: str) -> None:
    """Raises InvalidArgument if the value of a request's parameter is too long."""
    size, most = len(value.encode()), PARAMETERS[parameter].most
    if size > most:
        raise InvalidArgument(
            f"{label(record.client_id)}parameter '{parameter}' has {size} bytes, at most {most} are allowed"
        )


def validate_inner(
    prepared: PreparedRequest,
    own: RequestRecord,
    arrays: Mapping[str, Array],
    outputs: Collection[str],
    submitter: SubmitterLink[Request],
    version: ModelVersion,
    now_ns: int,
    sink: Sink,
    origin: Request | None = None,
) -> InnerRequest:
    """Validates a request that was made in the worker's own process, for example by a model. Returns the request.

    Args:
      prepared: the part of the request that other requests may have, too.
      own: the rest of the request.
      arrays: the inputs by name, in the shapes that a client would send. They are not copied, and nobody may write to them.
      outputs: the names of the wanted outputs; empty: all.
      sink: gets the responses.
      origin: the request on whose behalf this request is made; None: there is none.
    Raises ServingError: the request is invalid. The message is for the code that makes the request.
    """
    if own.replace_key:
        _check_replace_key(own)
    signature, taken = version.signature, dict(arrays)
    inputs = [PreparedTensor(name, datatype_of(array.dtype) or "", array.shape) for name, array in arrays.items()]
    checked = _check(inputs, prepared, own, version)
    if not checked.plain:
        for name, array in arrays.items():
            spec = signature.inputs[name]
            taken[name] = cast(Array, array.reshape(_model_shape(signature, spec, array.shape)))
    for name in outputs:
        if name not in signature.outputs:
            raise InvalidArgument(f"unexpected inference output '{name}' for model '{version.name}'")
    # Steps of an ensemble all have its request's parameters, each of which is meant for one of them.
    shared = origin is not None and prepared.parameters is origin.prepared.parameters
    if prepared.parameters and not shared and (parameters := version.loaded.known_parameters) is not None:
        parameters.check(prepared.parameters, label(own.client_id))
    chosen = _chosen(own, version) if own.parameter_set else None
    tells = _tells(prepared, own, version) if prepared.parameters else False
    key = checked.key if chosen is None else _key_of(version, checked.key, chosen)
    if own.strikes:
        key = (key, own.request_id, submitter.peer)
    wanted = {name: RequestedOutput(name) for name in outputs}
    request = InnerRequest(version, submitter, prepared, own, key, checked.rows, taken, wanted, [], now_ns)
    request.chosen, request.tells = chosen, tells
    return request.made_for(sink, origin)


def fitting(array: Array, dims: tuple[int, ...], batches: bool) -> Array:
    """Returns ``array`` with a batch axis of length 1 added or removed, if the model needs this, and else ``array`` itself.

    ``dims``: the model's shape without the batch axis. ``batches``: whether the model has a batch axis.
    """
    shape = array.shape
    if batches and len(shape) == len(dims):
        return cast(Array, array.reshape((1, *shape)))
    if not batches and len(shape) == len(dims) + 1 and shape[0] == 1:
        return cast(Array, array.reshape(shape[1:]))
    return array


# ------------------------------------------------------------------------------------------------------ checked, once a load


class _Shaped(NamedTuple):
    """Stands in for an array where only its shape counts."""

    shape: tuple[int, ...]


def _check(
    inputs: Sequence[PreparedTensor],
    prepared: PreparedRequest,
    record: RequestRecord,
    version: ModelVersion,
    contents: Sequence[Content] = (),
) -> Checked:
    described = tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in inputs])
    checked = version.checked.get(described)
    if checked is not None:
        return checked
    signature = version.signature
    _check_names(inputs, prepared, record, signature)
    rows = _batch_size(inputs, record, signature) if signature.batches else 1
    left = len(inputs)
    try:
        while left:
            _check_tensor(record, signature, inputs[left - 1])
            left -= 1
        shaped = {tensor.name: _Shaped(tensor.shape) for tensor in inputs}
        for tensor in inputs:
            spec = signature.inputs[tensor.name]
            if spec.reshaped:
                shaped[tensor.name] = _Shaped(_model_shape(signature, spec, tensor.shape))
        key = version.key(cast(Mapping[str, Array], shaped))
    except ServingError:
        # As in Triton, the bytes of the inputs after the invalid one are checked first.
        for tensor, content in zip(reversed(inputs[left:]), reversed(contents[left:]), strict=False):
            _array(record, signature, tensor, content)
        raise
    specs = [signature.inputs[tensor.name] for tensor in inputs]
    sizes = [math.prod(tensor.shape) * spec.dtype.itemsize for tensor, spec in zip(inputs, specs, strict=True)]
    plain = all(spec.plain for spec in signature.inputs.values()) and max(sizes, default=0) <= MAX_ELEMENTS
    checked = Checked(key, rows, plain, [spec.dtype for spec in specs], sizes)
    version.checked.learn(described, checked)
    return checked


def _check_names(
    inputs: Sequence[PreparedTensor], prepared: PreparedRequest, record: RequestRecord, signature: Signature
) -> None:
    given = [tensor.name for tensor in inputs]
    seen: set[str] = set()
    for name in given:
        if name in seen:
            raise InvalidArgument(f"{label(record.client_id)}input '{name}' already exists in request")
        seen.add(name)
    required, most = signature.required, len(signature.inputs)
    if not required <= len(given) <= most:
        raise _wrong_count(prepared, record, signature, given)
    for name in reversed(given):
        if name not in signature.inputs:
            raise InvalidArgument(f"unexpected inference input '{name}' for model '{signature.model}'")
    if any(not spec.optional and spec.name not in given for spec in signature.inputs.values()):
        raise _wrong_count(prepared, record, signature, given)


def _wrong_count(prepared: PreparedRequest, own: RequestRecord, signature: Signature, given: list[str]) -> ServingError:
    required, most = signature.required, len(signature.inputs)
    expected = (
        f"expected {most} inputs" if required == most else f"expected number of inputs between {required} and {most}"
    )
    missing = [spec.name for spec in signature.inputs.values() if spec.name not in given and not spec.optional]
    # A misspelt input of generate is one.
    parameters = all_parameters(prepared, own)
    named = f" Its parameters are [{_quoted([*parameters])}]." if missing and parameters else ""
    fault = f"missing required input(s) [{_quoted(missing)}]. Please provide all required input(s)."
    if not missing:
        fault = f"the model takes [{_quoted([*signature.inputs])}]."
    return InvalidArgument(
        f"{label(own.client_id)}{expected} but got {len(given)} inputs for model '{signature.model}'. "
        f"Got input(s) [{_quoted(given[::-1])}], but {fault}{named}"
    )


def _quoted(names: list[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _batch_size(inputs: Sequence[PreparedTensor], record: RequestRecord, signature: Signature) -> int:
    rows: int | None = None
    for tensor in reversed(inputs):
        if not tensor.shape:
            raise InvalidArgument(
                f"{label(record.client_id)}input '{tensor.name}' has no shape but model requires batch dimension "
                f"for '{signature.model}'"
            )
        if rows is not None and tensor.shape[0] != rows:
            raise InvalidArgument(
                f"{label(record.client_id)}input '{tensor.name}' batch size does not match other inputs for '{signature.model}'"
            )
        rows = tensor.shape[0]
    rows = 1 if rows is None else rows  # only a model whose inputs are all optional gets here without any
    if rows > signature.max_batch_size:
        raise InvalidArgument(
            f"{label(record.client_id)}inference request batch-size must be <= {signature.max_batch_size} for '{signature.model}'"
        )
    if rows < 1:
        raise InvalidArgument(
            f"{label(record.client_id)}inference request batch-size must be at least 1 for '{signature.model}', got {rows}"
        )
    return rows


def _check_tensor(record: RequestRecord, signature: Signature, tensor: PreparedTensor) -> None:
    """Raises InvalidArgument if a tensor's datatype or shape does not fit the model."""
    spec, shape = signature.inputs[tensor.name], tensor.shape
    if tensor.datatype != spec.datatype:
        raise InvalidArgument(
            f"{label(record.client_id)}inference input '{spec.name}' data-type is '{tensor.datatype}', "
            f"but model '{signature.model}' expects '{spec.datatype}'"
        )
    if not spec.fits(shape[1:] if signature.batches else shape):
        dims = (-1, *spec.dims) if signature.batches else spec.dims
        raise InvalidArgument(
            f"{label(record.client_id)}unexpected shape for input '{spec.name}' for model '{signature.model}'. "
            f"Expected {_dims(dims)}, got {_dims(shape)}. {_BATCH_NOTE if signature.batches else ''}"
        )


def _model_shape(signature: Signature, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    lead = shape[:1] if signature.batches else ()
    return lead + spec.to_model(shape[len(lead) :])


def _dims(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


# ------------------------------------------------------------------------------------------------- placed, once a request


def _contents(
    prepared: PreparedRequest,
    record: RequestRecord,
    submitter: SubmitterLink[Request],
    regions: RegionTable | LaneSegments,
    leased: list[AnyRegion],
) -> list[Content]:
    contents: list[Content] = []
    for tensor, place in placed(prepared.inputs, record.contents):
        if isinstance(place, bytes):
            contents.append(place)
        elif isinstance(place, Slice):
            contents.append(submitter.lane.view(place))
        else:
            region = regions.find(place.region)
            if not place.byte_size and 0 not in tensor.shape:
                check_range(place.offset, 0, region.byte_size, place.region)
                raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{place.region}'")
            if isinstance(region, Region):
                contents.append(region.view(place.offset, place.byte_size))
            else:
                check_range(place.offset, place.byte_size, region.byte_size, place.region)
                at = place.offset, np.dtype(np.uint8), (place.byte_size,)
                contents.append(
                    CudaTensor(region, *at) if isinstance(region, CudaRegion) else RegionTensor(region, *at)
                )
            region.lease()
            leased.append(region)
    return contents


def _with_known_shape(prepared: PreparedRequest, record: RequestRecord, contents: list[Content]) -> PreparedRequest:
    if not [tensor for tensor in prepared.inputs if OPEN in tensor.shape]:
        return prepared
    tensors: list[PreparedTensor] = []
    for tensor, content in zip(prepared.inputs, contents, strict=True):
        if OPEN in tensor.shape:
            what = f"{label(record.client_id)}input '{tensor.name}' shape"
            if tensor.datatype == "BYTES":
                # Read from a copy, as the elements are: nobody else can write to that.
                content = np.asarray(content).tobytes() if isinstance(content, LateTensor) else bytes(content)
                count = elements(tensor.datatype, content, what)
            else:
                count = len(content) // (ELEMENT_SIZES.get(tensor.datatype) or 1)
            tensor = replace(tensor, shape=closed(tensor.shape, count, what))
        tensors.append(tensor)
    return replace(prepared, inputs=tuple(tensors))


def _give_types(named: dict[str, Content], prepared: PreparedRequest, checked: Checked) -> None:
    for tensor, dtype in zip(prepared.inputs, checked.dtypes, strict=True):
        content = named[tensor.name]
        if isinstance(content, LateTensor):
            named[tensor.name] = content.view(dtype, tensor.shape)


def _arrays(
    prepared: PreparedRequest, record: RequestRecord, signature: Signature, contents: list[Content]
) -> dict[str, Array]:
    """Returns the inputs' arrays by name. ``contents``: the bytes of each input."""
    made = {
        tensor.name: _array(record, signature, tensor, content)
        for tensor, content in zip(reversed(prepared.inputs), reversed(contents), strict=True)
    }
    return {tensor.name: made[tensor.name] for tensor in prepared.inputs}


def _array(record: RequestRecord, signature: Signature, tensor: PreparedTensor, content: Content) -> Array:
    """Makes the array that the model gets for an input from the input's bytes."""
    spec, shape = signature.inputs[tensor.name], tensor.shape
    if spec.datatype == "BYTES":
        # The snapshot comes first: lengths are read from it, not from memory somebody else can write.
        try:
            snapshot = np.asarray(content).tobytes() if isinstance(content, LateTensor) else bytes(content)
            made = received_strings(snapshot, shape, f"input '{spec.name}'", f" for model '{signature.model}'")
        except IncompleteString:
            raise
        except InvalidArgument as error:
            raise InvalidArgument(label(record.client_id) + error.message) from None
    else:
        needed = math.prod(shape) * spec.dtype.itemsize
        if needed != len(content) or needed > MAX_ELEMENTS:
            raise InvalidArgument(
                f"{label(record.client_id)}input byte size mismatch for input '{spec.name}' for model '{signature.model}'. "
                f"Expected {needed}, got {len(content)}"
            )
        if isinstance(content, LateTensor):
            # Fetched when it is its turn, so that a queue holds no copies; an array to whoever does not ask.
            made = cast(Array, content.view(spec.dtype, shape))
        else:
            made = np.frombuffer(content, spec.dtype).reshape(shape)
        if spec.datatype == "BOOL" and isinstance(made, np.ndarray):
            # Any byte but 0 is true on the wire; in memory a truth value may only be 0 or 1.
            made = made.view(np.uint8) != 0
    return made.reshape(_model_shape(signature, spec, shape)) if spec.reshaped else made


def _outputs(
    prepared: PreparedRequest,
    record: RequestRecord,
    signature: Signature,
    regions: RegionTable | LaneSegments,
    leased: list[AnyRegion],
) -> dict[str, RequestedOutput]:
    wanted: dict[str, RequestedOutput] = {}
    for output in prepared.outputs:
        if output.name in wanted:
            raise InvalidArgument(f"{label(record.client_id)}output '{output.name}' already exists in request")
        if output.name not in signature.outputs:
            raise InvalidArgument(f"unexpected inference output '{output.name}' for model '{signature.model}'")
        wanted[output.name] = output
        place = output.region
        if place is None:
            continue
        if output.classification:
            raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
        region = regions.find(place.region)
        check_range(place.offset, place.byte_size, region.byte_size, place.region)
        region.lease()
        leased.append(region)
    return wanted
