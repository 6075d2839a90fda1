"""Writes a model's outputs to where the client wants them, and makes the record of the answer.

An output goes to a region, into the response arena, or into the record. An output that the program or the GPU has written to
its place already is not copied. When the record is returned, all copies are finished, also copies to a GPU's memory, and the
answer does not use the memory that the model returned.
Class labels have the form that Triton's docs/protocol/extension_classification.md describes. The order of equal elements and
the format of numbers are as observed in Triton.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np

from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import Array, address_of, byte_content, datatype_of
from tensord.shm.common.datatypes import DATATYPES
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.errors import Internal, InvalidArgument, ServingError
from tensord.shm.messages import AnswerRecord, PreparedAnswer, PreparedTensor, RegionSlice
from tensord.shm.messages import Content as SentContent
from tensord.shm.regions import SnapshotRegion, check_range
from tensord.workers.devices.device_array import GpuArray, standing
from tensord.workers.models.author_error import bounded
from tensord.workers.regions.places import Places
from tensord.workers.regions.region_table import AnyRegion, check_intact
from tensord.workers.requests.preparation import AnswerPlan, PlannedOutput
from tensord.workers.requests.request import Request
from tensord.workers.requests.result import Response
from tensord.workers.tensors.output_layout import BatchOutputs, OutputLayout
from tensord.workers.tensors.signature import TensorSpec

Content = bytes | Array
#: The most characters of an error that a client gets.
_MAX_MESSAGE = 8192


def failure(request_id: int, error: ServingError, version: int = 0, final: bool = True) -> AnswerRecord:
    """Returns the answer record that reports an error. A long message is cut off.

    ``version``: the model's version; 0: it is not known. ``final``: whether this is the request's last answer.
    """
    message = bounded(error.message, _MAX_MESSAGE)
    if not message.isascii():
        message = message.encode("utf-8", "replace").decode()
    return AnswerRecord(request_id, PreparedAnswer(version, final=final), code=error.code, message=message)


def plan_answer(request: Request, layout: OutputLayout, inline_byte_size: int) -> AnswerPlan | None:
    """Plans where the outputs of ``layout`` go in answers to a prepared request: into the answer's record, or a region.

    Returns None if all outputs together have more than ``inline_byte_size`` bytes, if the client wants class labels, or if an
    output does not fit into its region.
    """
    rows, wishes = request.rows, request.outputs
    if rows * layout.row_byte_size > inline_byte_size:
        return None
    tensors: list[PreparedTensor] = []
    parts: list[PlannedOutput] = []
    for name, datatype, content, start, step, size, shape in layout.outputs:
        region: RegionSlice | None = None
        if wishes:
            wanted = wishes.get(name)
            if wanted is None:
                continue
            region = wanted.region
            if wanted.classification or (region is not None and region.byte_size < rows * size):
                return None
        tensors.append(PreparedTensor(name, datatype, (rows, *shape) if layout.batches else shape, region))
        parts.append(PlannedOutput(content, start, step, size, region))
    prepared = PreparedAnswer(request.version.version, tuple(tensors), dict(request.told))
    inside = all(part.region is None for part in parts)
    return AnswerPlan(prepared, None, parts, sum([part.byte_size for part in parts]), inside, request.told)


def complete_planned(plan: AnswerPlan, request: Request, outputs: BatchOutputs, row: int) -> AnswerRecord | None:
    """Writes those outputs of a request that go to regions. Returns the record of its answer, which has the other outputs.

    Returns None, and writes nothing, if any region of the request is GPU memory. ``plan``: where each output goes.
    ``outputs``: the outputs of the batch. The request's outputs begin at ``row`` of the batch.
    Raises InvalidArgument: the memory of a region does not exist any more.
    """
    rows, contents = request.rows, outputs.contents
    parts = [
        contents[number][(at := start + row * step) : at + rows * size] for number, start, step, size, _ in plan.parts
    ]
    if request.regions:
        for used in request.regions:
            if isinstance(used, CudaRegion):
                return None
        for (*_, place), part in zip(plan.parts, parts, strict=True):
            if place is not None and part:
                target = request.leased(place.region)
                assert not isinstance(target, CudaRegion)
                target.write(place.offset, part)
        check_intact(request.regions)
        if not plan.inside:
            parts = [part for (*_, place), part in zip(plan.parts, parts, strict=True) if place is None]
    request.copied_byte_size += rows * plan.row_byte_size
    return AnswerRecord(request.request_id, plan.said, tuple(parts))


def find_places(request: Request, sizes: Mapping[str, int], inline_byte_size: int) -> Places | None:
    """Chooses where each output goes: to the region that the client named, into the answer's record, or to the response arena.

    Reserves memory in the response arena. Returns None if the response arena has no room now. ``sizes``: output name -> bytes.
    ``inline_byte_size``: the most bytes of all outputs together that go into the answer's record.
    Raises Internal if the client named too small a part of a region for an output. Raises InvalidArgument if the output would
    not lie wholly inside the region, or if the outputs are larger than the response arena. Raises Unavailable if the host has
    no memory left.
    """
    in_regions = _fit(request, sizes)
    left = inline_byte_size
    offsets: dict[str, int] = {}
    needed = 0
    for name, size in sizes.items():
        if name in in_regions:
            continue
        if size <= left:
            left -= size
        else:
            offsets[name] = needed
            needed += -(-size // ALIGNMENT) * ALIGNMENT
    lease = request.submitter.lane.loan(needed) if needed else None
    if needed and lease is None:
        return None
    read: list[tuple[AnyRegion, int, int]] = []
    if in_regions:
        places = [tensor.region for tensor in request.prepared.inputs if tensor.region is not None]
        read = [(request.leased(place.region), place.offset, place.byte_size) for place in places]
    return Places(sizes, in_regions, offsets, lease, read)


def _fit(request: Request, sizes: Mapping[str, int]) -> dict[str, tuple[RegionSlice, AnyRegion]]:
    places: dict[str, tuple[RegionSlice, AnyRegion]] = {}
    for name, wanted in request.outputs.items():
        if wanted.region is None or name not in sizes:
            continue
        size = sizes[name]
        if size > wanted.region.byte_size:
            raise Internal(
                f"shared memory size specified with the request for output '{name}' ({wanted.region.byte_size} bytes) "
                f"should be at least {size} bytes to hold the results"
            )
        region = request.leased(wanted.region.region)
        if size:
            check_range(wanted.region.offset, size, region.byte_size, region.name)
        places[name] = (wanted.region, region)
    return places


def complete(
    request: Request, result: dict[str, Array], inline_byte_size: int, places: Places | None = None, final: bool = True
) -> AnswerRecord | None:
    """Writes a request's outputs to where the client wants them, and returns the record of the answer.

    Returns None, and writes nothing, if the response arena is full. ``result``: the outputs by name. ``final``: whether this
    is the request's last answer.
    ``inline_byte_size``: the most bytes of all outputs together that go into the record itself.
    ``places``: where each output is written; if None, this function chooses that, and reserves memory in the response arena.
    If this function raises an error, the memory that is reserved for the outputs is released.
    Raises Internal if an output is larger than the client's part of a region, or has a dtype for which there is no datatype.
    Raises InvalidArgument if the outputs are larger than the arena, if an output for which the client wants class labels cannot
    have any, if an output would not lie wholly inside its region, or if the memory of a region is gone.
    Raises Unavailable if the host has no memory left, or if too many files are open to send an arena segment.
    """
    try:
        chosen = _choose(request, result)
        sizes = {name: _byte_size(content) for name, (_, _, content) in chosen.items()}
        if places is None:
            places = find_places(request, sizes, inline_byte_size)
            if places is None:
                return None
        tensors, contents = _put(request, chosen, places)
        if places.lease is not None:
            request.submitter.lane.announce(places.lease.place.segment)
    except BaseException:
        if places is not None:
            places.release()
        raise
    parameters = {**(result.parameters if isinstance(result, Response) else {}), **request.told}
    prepared = PreparedAnswer(request.version.version, tuple(tensors), parameters, final)
    return AnswerRecord(request.request_id, prepared, tuple(contents), places.take_lease())


def _put(
    request: Request, chosen: dict[str, tuple[str, tuple[int, ...], Content]], places: Places
) -> tuple[list[PreparedTensor], list[SentContent]]:
    tensors: list[PreparedTensor] = []
    contents: list[SentContent] = []
    #: The outputs that are being copied to a GPU's memory; they are kept here until their copies have finished.
    read: list[Content] = []
    with contextlib.ExitStack() as copies:
        for name, (datatype, shape, content) in chosen.items():
            place: RegionSlice | None = None
            size = _byte_size(content)
            written = name in places.written
            if not written:
                request.copied_byte_size += size
            if name in places.in_regions:
                place, region = places.in_regions[name]
                if written:
                    pass  # by its program, or by the GPU
                elif isinstance(region, CudaRegion):
                    if size:
                        copies.callback(region.settle)
                        read.append(_begin_copy(region, place.offset, content))
                elif isinstance(region, SnapshotRegion):
                    # It is not mapped here, but written by system calls.
                    if isinstance(content, bytes):
                        region.write(place.offset, content)
                    elif size:
                        region.write(place.offset, np.ascontiguousarray(content).reshape(-1).view(np.uint8).data)
                elif size:
                    _write(region.view(place.offset, size), content)
            elif (own := places.in_arena(name)) is not None:
                memory = None if written else places.memory(name)
                if memory is not None:
                    _write(memory, content)
                contents.append(own)
            else:
                contents.append(content if isinstance(content, bytes) else content.tobytes())
            tensors.append(PreparedTensor(name, datatype, shape, place))
    # After the last byte was read and written: what was missing meanwhile makes the whole answer void.
    check_intact(request.regions)
    return tensors, contents


def _begin_copy(region: CudaRegion, offset: int, content: Content) -> Content:
    """Starts a copy of ``content`` to ``offset`` of a region in a GPU's memory. Returns what the copy reads.

    ``region.settle`` waits for the copy.
    """
    if isinstance(content, GpuArray):
        region.copy(offset, content.pointer, content.nbytes)
        return content
    flat = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else np.ascontiguousarray(content)
    # It may be a client's memory that the model has handed through.
    flat = standing(flat)
    region.write(offset, address_of(flat), flat.nbytes)
    return flat


def _choose(request: Request, result: dict[str, Array]) -> dict[str, tuple[str, tuple[int, ...], Content]]:
    """Returns the datatype, shape and content of each output that the request asks for, by output name."""
    signature = request.version.signature
    chosen: dict[str, tuple[str, tuple[int, ...], Content]] = {}
    for name, array in result.items():
        wanted = request.outputs.get(name)
        if wanted is None and request.outputs:
            continue
        if wanted is not None and wanted.classification:
            array = classify(signature.outputs[name], np.asarray(array), wanted.classification, signature.batches)
        datatype = datatype_of(array.dtype)
        if datatype is None:
            raise Internal(
                f"output '{name}' of model '{signature.model}' has dtype {array.dtype}, which has no name here"
            )
        chosen[name] = (datatype, array.shape, byte_content(array) if datatype == "BYTES" else array)
    return chosen


def _byte_size(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.nbytes


def _write(view: memoryview, content: Content) -> None:
    if isinstance(content, bytes):
        view[:] = content
    elif isinstance(content, GpuArray):
        content.copy_into(view)
    elif content.nbytes:
        np.copyto(np.frombuffer(view, content.dtype).reshape(content.shape), content)


#: Elements of one output that are told. The loop of a worker writes their texts, and serves nobody else meanwhile.
_MOST = 1 << 15


def classify(spec: TensorSpec, values: Array, count: int, batches: bool) -> Array:
    """Returns each row's ``count`` largest elements as strings "value:index", or "value:index:label" if the index has a label.

    If ``batches`` is True, the result is BYTES[rows, count]. Otherwise ``values`` is one row, and the result is BYTES[count].
    If a row has fewer elements, all are returned. The largest element comes first, and among equal elements the lowest index.
    Raises InvalidArgument if the result would have more than 32768 strings, or if ``values`` are not integers, FP32 or FP64.
    """
    datatype = datatype_of(values.dtype)
    if datatype is None or DATATYPES[datatype].json in ("", "string", "boolean"):
        raise InvalidArgument(
            f"class result not available for output due to unsupported type '{datatype or values.dtype}'"
        )
    batches = batches and values.ndim > 0
    rows = values.reshape(values.shape[0], -1) if batches else values.reshape(1, -1)
    k = min(count, rows.shape[1])
    if len(rows) * k > _MOST:
        raise InvalidArgument(
            f"output '{spec.name}': {len(rows) * k} classes are asked for, at most {_MOST} of an output are told"
        )
    best = np.empty((len(rows), k), np.object_)
    for number, row in enumerate(rows):
        best[number] = [_text(spec, row, index) for index in _largest(row, k).tolist()]
    return best if batches else best.reshape(k)


def _largest(row: Array, count: int) -> Array:
    """Returns the indices of a row's ``count`` largest elements, largest first."""
    # Sorting all of a long row takes longer.
    if 8 * count < len(row):
        known = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
        among = np.flatnonzero(known >= np.partition(known, -count)[-count])
        return among[_ordered(row[among])[:count]]
    return _ordered(row)[:count]


def _ordered(row: Array) -> Array:
    """Returns the indices of a row's elements by value, largest first, NaN last."""
    # Not negated for the sort, because unsigned and extreme integers would wrap.
    ascending = np.argsort(row[::-1], kind="stable")
    largest = len(row) - 1 - ascending[::-1]
    if row.dtype.kind != "f":
        return largest
    nameless = np.isnan(row[largest])
    return np.concatenate([largest[~nameless], largest[nameless]])


def _text(spec: TensorSpec, row: Array, index: int) -> bytes:
    value = row[index]
    text = f"{value:f}:{index}" if row.dtype.kind == "f" else f"{value}:{index}"
    label = spec.labels[index] if index < len(spec.labels) else ""
    return (f"{text}:{label}" if label else text).encode()
