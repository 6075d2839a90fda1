"""From the record of a request to a Request, believing nothing: the record is read as if an enemy had written it.

Texts and the order of checks are Triton's: names and number of the inputs, batch size, then datatype, shape and size of each, the
last input of the request first, as its hash table hands them out. Numeric tensors become views of the bytes where they lie;
BYTES are copied before their lengths are read. Whatever is refused here was never queued, and holds no lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
from msgspec.structs import replace

from tensord.shm.arrays import Array, IncompleteString, array
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.datatypes import ELEMENT_SIZES, MAX_ELEMENTS
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import (
    Place,
    PreparedRequest,
    PreparedTensor,
    RegionSlice,
    RequestedOutput,
    RequestRecord,
    Slice,
    placed,
)
from tensord.shm.open_shape import closed, elements, is_open
from tensord.shm.regions import Region, check_range
from tensord.shm.snapshot_region import SnapshotRegion
from tensord.workers.devices.cuda_tensor import CudaTensor
from tensord.workers.dispatch.input_checks import batch_size, check_names, check_tensor, model_shape
from tensord.workers.models.model_version import ModelVersion
from tensord.workers.regions.region_table import AnyRegion, RegionTable
from tensord.workers.regions.region_tensor import LateTensor, RegionTensor
from tensord.workers.requests.familiar import Inputs, Known
from tensord.workers.requests.preparation import Preparation
from tensord.workers.requests.request import Request, label
from tensord.workers.requests.submitter import Submitter
from tensord.workers.tensors.signature import Signature

#: Datatypes whose tensors are copied before they are used, wherever they lie.
_COPIED = ("BYTES", "BOOL")

Content = bytes | memoryview | LateTensor


def validate(
    own: RequestRecord,
    prepared: PreparedRequest,
    submitter: Submitter[Request],
    version: ModelVersion,
    regions: RegionTable,
    now_ns: int,
) -> Request:
    """Makes a request of a record and what was prepared for it, or came in it.

    Raises: ServingError: what is wrong, in a sentence for the client; nothing stays leased.
    """
    signature = version.signature
    leased: list[AnyRegion] = []
    try:
        inputs = _described(prepared)
        tensors = placed(prepared.inputs, own.contents)
        known = version.familiar.find(inputs)
        if known is not None and own.strikes == 0:
            familiar = _familiar(tensors, submitter, known, regions, leased)
            if familiar is not None:
                outputs = _outputs(prepared, own, signature, regions, leased) if prepared.outputs else {}
                return Request(
                    version, submitter, prepared, own, known.key, known.rows, None, outputs, leased, now_ns, 0, familiar
                )
        # What a front of Triton looks at comes first, then what its core does.
        contents = _contents(tensors, submitter, regions, leased)
        if any(is_open(shape) for _, _, shape in inputs):
            prepared = _closed(prepared, own, contents)
            inputs = _described(prepared)
        outputs = _outputs(prepared, own, signature, regions, leased) if prepared.outputs else {}
        check_names(prepared, own, signature)
        rows = batch_size(prepared, own, signature) if signature.batches else 0
        made = {
            tensor.name: _checked(own, signature, tensor, content)
            for tensor, content in zip(reversed(prepared.inputs), reversed(contents), strict=True)
        }
        arrays = {tensor.name: made[tensor.name] for tensor in prepared.inputs}
        copied = sum(
            [
                len(content)
                for tensor, content in zip(prepared.inputs, contents, strict=True)
                if tensor.datatype in _COPIED
            ]
        )
        # A request under which a worker has died runs alone, so that it cannot take others with it.
        key = version.key(arrays)
        if known is None and all(spec.plain for spec in signature.inputs.values()):
            version.familiar.learn(
                inputs, Known(key, rows or 1, [(array.dtype, array.nbytes) for array in arrays.values()])
            )
        shared = key if own.strikes == 0 else (key, own.request_id, submitter.peer)
        return Request(version, submitter, prepared, own, shared, rows or 1, arrays, outputs, leased, now_ns, copied)
    except BaseException:
        for region in leased:
            region.unlease()
        raise


def validate_again(
    own: RequestRecord,
    preparation: Preparation,
    submitter: Submitter[Request],
    version: ModelVersion,
    regions: RegionTable,
    now_ns: int,
) -> Request:
    """Makes a request of a record with a number: what was found when one like it was validated is not looked at again.

    Raises: ServingError: as ``validate``.  InvalidArgument: it has other tensors than were prepared.
    """
    prepared = preparation.prepared
    known = preparation.known if preparation.familiar is version.familiar and not own.strikes else None
    if known is not None:
        leased: list[AnyRegion] = []
        try:
            contents = _places(own, preparation, known, submitter, regions, leased)
            if contents is not None:
                outputs = preparation.outputs
                if outputs is None:
                    outputs = _outputs(prepared, own, version.signature, regions, leased)
                return Request(
                    version,
                    submitter,
                    prepared,
                    own,
                    known.key,
                    known.rows,
                    None,
                    outputs,
                    leased,
                    now_ns,
                    0,
                    contents,
                    preparation,
                )
        except BaseException:
            for region in leased:
                region.unlease()
            raise
    request = validate(own, prepared, submitter, version, regions, now_ns)
    preparation.learn(version.familiar, version.familiar.find(_described(prepared)), request.outputs)
    return request


# --------------------------------------------------------------------------------------------------------------- inputs


def _described(prepared: PreparedRequest) -> Inputs:
    return tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in prepared.inputs])


def _places(
    own: RequestRecord,
    preparation: Preparation,
    known: Known,
    submitter: Submitter[Request],
    regions: RegionTable,
    leased: list[AnyRegion],
) -> Mapping[str, Content] | None:
    """As ``_familiar``."""
    if preparation.names is None:
        return _familiar(placed(preparation.prepared.inputs, own.contents), submitter, known, regions, leased)
    contents: list[bytes | memoryview] = [
        content if type(content) is bytes else submitter.lane.view(content)  # type: ignore[arg-type]
        for content in own.contents
    ]
    # Of other sizes, or another number of them: the long way says what is wrong.
    return dict(zip(preparation.names, contents, strict=True)) if [*map(len, contents)] == preparation.sizes else None


def _familiar(
    tensors: list[tuple[PreparedTensor, Place]],
    submitter: Submitter[Request],
    known: Known,
    regions: RegionTable,
    leased: list[AnyRegion],
) -> dict[str, Content] | None:
    """The inputs of a request whose names, datatypes and shapes were found right before: only their places are new.

    None: a size is not that of the shape; the long way says what is wrong with it.
    """
    contents: dict[str, Content] = {}
    used: list[AnyRegion] = []
    for (tensor, place), (dtype, byte_size) in zip(tensors, known.tensors, strict=True):
        content: Content
        if type(place) is bytes:
            content = place
        elif type(place) is Slice:
            content = submitter.lane.view(place)
        else:
            assert isinstance(place, RegionSlice)
            region = regions.find(place.region)
            used.append(region)
            content = (
                region.view(place.offset, place.byte_size) if isinstance(region, Region) else _slice(region, place)
            )
        if len(content) != byte_size:
            return None
        contents[tensor.name] = (
            content if isinstance(content, (bytes, memoryview)) else content.view(dtype, tensor.shape)
        )
    for region in used:
        region.lease()
        leased.append(region)
    return contents


def _contents(
    tensors: list[tuple[PreparedTensor, Place]],
    submitter: Submitter[Request],
    regions: RegionTable,
    leased: list[AnyRegion],
) -> list[Content]:
    """Where the bytes of each input are, in the order of the request."""
    contents: list[Content] = []
    for tensor, place in tensors:
        if isinstance(place, bytes):
            contents.append(place)
        elif isinstance(place, Slice):
            contents.append(submitter.lane.view(place))
        else:
            region = regions.find(place.region)
            if not place.byte_size and 0 not in tensor.shape:
                check_range(place.offset, 0, region.byte_size, place.region)
                raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{place.region}'")
            if not isinstance(region, Region):
                contents.append(_slice(region, place))
            else:
                contents.append(region.view(place.offset, place.byte_size))
            region.lease()
            leased.append(region)
    return contents


def _closed(prepared: PreparedRequest, own: RequestRecord, contents: list[Content]) -> PreparedRequest:
    """Finds the dimensions that the client left to be found. Raises InvalidArgument: there are none such."""
    tensors: list[PreparedTensor] = []
    for tensor, content in zip(prepared.inputs, contents, strict=True):
        if is_open(tensor.shape):
            what = f"{label(own.client_id)}input '{tensor.name}' shape"
            if tensor.datatype == "BYTES":
                # Read from a copy, as the elements are: nobody else can write to that.
                content = np.asarray(content).tobytes() if isinstance(content, LateTensor) else bytes(content)
                count = elements(tensor.datatype, content, what)
            else:
                count = len(content) // (ELEMENT_SIZES.get(tensor.datatype) or 1)
            tensor = replace(tensor, shape=closed(tensor.shape, count, what))
        tensors.append(tensor)
    return replace(prepared, inputs=tuple(tensors))


def _slice(region: SnapshotRegion | CudaRegion, place: RegionSlice) -> LateTensor:
    check_range(place.offset, place.byte_size, region.byte_size, place.region)
    if isinstance(region, CudaRegion):
        return CudaTensor(region, place.offset, np.dtype(np.uint8), (place.byte_size,))
    return RegionTensor(region, place.offset, np.dtype(np.uint8), (place.byte_size,))


def _checked(own: RequestRecord, signature: Signature, tensor: PreparedTensor, content: Content) -> Array:
    """The tensor as an array of the model's shape."""
    spec, shape = signature.inputs[tensor.name], tensor.shape
    check_tensor(own, signature, tensor)
    if spec.datatype == "BYTES":
        # The snapshot comes first: lengths are read from it, not from memory somebody else can write.
        try:
            snapshot = np.asarray(content).tobytes() if isinstance(content, LateTensor) else bytes(content)
            made = array(snapshot, "BYTES", shape, f"input '{spec.name}'", f" for model '{signature.model}'")
        except IncompleteString:
            raise
        except InvalidArgument as error:
            raise InvalidArgument(label(own.client_id) + error.message) from None
    else:
        count = 1
        for size in shape:
            count *= size
        needed = count * spec.dtype.itemsize
        if needed != len(content) or needed > MAX_ELEMENTS:
            raise InvalidArgument(
                f"{label(own.client_id)}input byte size mismatch for input '{spec.name}' for model '{signature.model}'. "
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
    return made.reshape(model_shape(signature, spec, shape)) if spec.reshaped else made


# -------------------------------------------------------------------------------------------------------------- outputs


def _outputs(
    prepared: PreparedRequest,
    own: RequestRecord,
    signature: Signature,
    regions: RegionTable,
    leased: list[AnyRegion],
) -> dict[str, RequestedOutput]:
    """Requested outputs by name."""
    wanted: dict[str, RequestedOutput] = {}
    for output in prepared.outputs:
        if output.name in wanted:
            raise InvalidArgument(f"{label(own.client_id)}output '{output.name}' already exists in request")
        if output.name not in signature.outputs:
            raise InvalidArgument(f"unexpected inference output '{output.name}' for model '{signature.model}'")
        wanted[output.name] = output
        if output.region is not None:
            _check_room(output.region, output, regions, leased)
    return wanted


def _check_room(place: RegionSlice, output: RequestedOutput, regions: RegionTable, leased: list[AnyRegion]) -> None:
    if output.classification:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
    region = regions.find(place.region)
    check_range(place.offset, place.byte_size, region.byte_size, place.region)
    region.lease()
    leased.append(region)
