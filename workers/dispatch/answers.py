"""From a result to an answer: every output is put where its client wants it, and only then it is announced.

    places found (workers/requests/places.py) ─▶ written, unless the program or the GPU has done so itself ─▶ announced

This is the one copy on the way out (docs/data-plane.md). It also parts the answer from whatever memory the model returned. Copies
into a GPU's memory are waited for.
"""

from __future__ import annotations

import contextlib

import numpy as np

from tensord.shm.arrays import Array, address_of, byte_content, datatype_of
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.errors import Internal, ServingError
from tensord.shm.messages import AnswerRecord, PreparedAnswer, PreparedTensor, RegionSlice
from tensord.shm.messages import Content as SentContent
from tensord.shm.prepared import Numbered
from tensord.shm.snapshot_region import SnapshotRegion
from tensord.workers.devices.client_memory import standing
from tensord.workers.devices.device_array import DeviceArray
from tensord.workers.dispatch.classification import classify
from tensord.workers.models.author_error import bounded
from tensord.workers.regions.region_table import check_intact
from tensord.workers.requests.places import Places, leased
from tensord.workers.requests.prepared import AnswerPlan, Part
from tensord.workers.requests.request import Request
from tensord.workers.requests.result import Response
from tensord.workers.tensors.batch_outputs import BatchOutputs, OutputLayout
from tensord.workers.tensors.signature import Signature

Content = bytes | Array
#: Characters of what went wrong that a client is told.
_MAX_MESSAGE = 8192


def failure(request_id: int, error: ServingError, version: int = 0, final: bool = True) -> AnswerRecord:
    """Says what went wrong. A model may say it in any characters and at any length."""
    message = bounded(error.message, _MAX_MESSAGE)
    if not message.isascii():
        message = message.encode("utf-8", "replace").decode()
    return AnswerRecord(request_id, PreparedAnswer(version, final=final), code=error.code, message=message)


def complete(
    request: Request,
    result: dict[str, Array],
    signature: Signature,
    version: int,
    inline_byte_size: int,
    places: Places | None = None,
    final: bool = True,
) -> AnswerRecord | None:
    """Puts the outputs into place. The answer has no number.

    None: the response arena is full now; nothing was written anywhere, ask again later.

    Args:
      places: those found before the program ran, which may have written outputs there by itself; they are this function's now.
    Raises: Internal: an output does not fit where its client wants it.  InvalidArgument: larger than the whole response arena.
    """
    try:
        chosen = _choose(request, result, signature)
        sizes = {name: _byte_size(content) for name, (_, _, content) in chosen.items()}
        if places is None:
            places = Places.find(request, sizes, inline_byte_size)
            if places is None:
                return None
        tensors, contents = _put(request, chosen, places)
    except BaseException:
        if places is not None:
            places.release()
        raise
    parameters = result.parameters if isinstance(result, Response) else {}
    prepared = PreparedAnswer(version, tuple(tensors), parameters, final)
    return AnswerRecord(request.request_id, prepared, tuple(contents), places.take_lease())


def _put(
    request: Request, chosen: dict[str, tuple[str, tuple[int, ...], Content]], places: Places
) -> tuple[list[PreparedTensor], list[SentContent]]:
    """Writes what is not there already. Raises InvalidArgument: a region is not there any more."""
    tensors: list[PreparedTensor] = []
    contents: list[SentContent] = []
    queued = _Queued()
    try:
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
                    queued.write(region, place.offset, content)
                elif isinstance(region, SnapshotRegion):
                    _write_snapshot(region, place.offset, content)
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
        queued.settle()
        # After the last byte was read and written: what was missing meanwhile makes the whole answer void.
        check_intact(request.regions)
    except ServingError:
        queued.abandon()
        raise
    return tensors, contents


def complete_planned(request: Request, plan: AnswerPlan, made: BatchOutputs, row: int) -> AnswerRecord | None:
    """A small answer to a request like an earlier one that was answered out of outputs that lay alike.

    Returns: None: a region is a GPU's now; nothing was written anywhere.
    Raises: as ``complete``.
    """
    rows, contents = request.rows, made.contents
    parts = [
        contents[number][(at := start + row * step) : at + rows * size] for number, start, step, size, _ in plan.parts
    ]
    if request.regions:
        places = [part.region for part in plan.parts]
        if not _write_small(
            request, [(place, part) for place, part in zip(places, parts, strict=True) if place and part]
        ):
            return None
        if not plan.inside:
            parts = [part for place, part in zip(places, parts, strict=True) if not place]
    request.copied_byte_size += rows * plan.row_byte_size
    return AnswerRecord(request.request_id, plan.numbered.number, tuple(parts))


def plan_answer(numbered: Numbered[PreparedAnswer], request: Request, layout: OutputLayout) -> AnswerPlan:
    """How ``complete_small`` answers such a request, for the next ones."""
    parts: list[Part] = []
    for name, _, content, start, step, size, _ in layout.outputs:
        if request.outputs and name not in request.outputs:
            continue
        wanted = request.outputs.get(name)
        parts.append(Part(content, start, step, size, None if wanted is None else wanted.region))
    return AnswerPlan(
        numbered, parts, sum([part.byte_size for part in parts]), all(part.region is None for part in parts)
    )


def complete_small(
    request: Request, made: BatchOutputs, row: int, version: int, inline_byte_size: int
) -> AnswerRecord | None:
    """The most frequent kind of answer, a few small tensors: into the record, or where a region is named into that.

    Args:
      made: what the request's whole batch came to; the request's part begins at ``row``.
    Returns: None: it is another kind of answer; nothing was written anywhere.
    Raises: as ``complete``.
    """
    rows, layout = request.rows, made.layout
    if rows * layout.row_byte_size > inline_byte_size:
        return None
    tensors: list[PreparedTensor] = []
    contents: list[SentContent] = []
    writes: list[tuple[RegionSlice, bytes]] = []
    wishes, copied = request.outputs, 0
    for name, datatype, content, start, step, size, shape in layout.outputs:
        region: RegionSlice | None = None
        if wishes:
            wanted = wishes.get(name)
            if wanted is None:
                continue
            region = wanted.region
            if wanted.classification or (region is not None and region.byte_size < rows * size):
                return None
        at = start + row * step
        part = made.contents[content][at : at + rows * size]
        copied += len(part)
        tensors.append(PreparedTensor(name, datatype, (rows, *shape) if layout.batches else shape, region))
        if region is None:
            contents.append(part)
        elif part:
            writes.append((region, part))
    if request.regions and not _write_small(request, writes):
        return None
    request.copied_byte_size += copied
    return AnswerRecord(request.request_id, PreparedAnswer(version, tuple(tensors)), tuple(contents))


def _write_small(request: Request, writes: list[tuple[RegionSlice, bytes]]) -> bool:
    """Writes outputs into regions. False: a region of the request is a GPU's; nothing was written."""
    for used in request.regions:
        if isinstance(used, CudaRegion):
            return False
    for place, part in writes:
        target = leased(request, place.region)
        assert not isinstance(target, CudaRegion)
        target.write(place.offset, part)
    check_intact(request.regions)
    return True


def _choose(
    request: Request, result: dict[str, Array], signature: Signature
) -> dict[str, tuple[str, tuple[int, ...], Content]]:
    """Name -> datatype, shape and content of what is asked for, in the order the model made it."""
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


class _Queued:
    """The copies of one answer into GPU memory: under way until ``settle``, and their sources kept as long."""

    __slots__ = ("_regions", "_sources")

    def __init__(self) -> None:
        self._regions: list[CudaRegion] = []
        self._sources: list[Array | DeviceArray] = []

    def write(self, region: CudaRegion, offset: int, content: Content) -> None:
        """Raises InvalidArgument: the region cannot be written any more.  DeviceLost."""
        if not _byte_size(content):
            return
        self._regions.append(region)
        if isinstance(content, DeviceArray):
            self._sources.append(content)
            region.copy(offset, content.pointer, content.nbytes)
            return
        flat = np.frombuffer(content, np.uint8) if isinstance(content, bytes) else np.ascontiguousarray(content)
        # It may be a client's memory that the model has handed through.
        flat = standing(flat)
        self._sources.append(flat)
        region.write(offset, address_of(flat), flat.nbytes)

    def settle(self) -> None:
        """Returns when the bytes are there. Raises as ``write``."""
        for region in self._regions:
            region.settle()

    def abandon(self) -> None:
        """The answer is an error: only nothing may be under way any more when the sources go."""
        for region in self._regions:
            with contextlib.suppress(ServingError):
                region.settle()


def _write_snapshot(region: SnapshotRegion, offset: int, content: Content) -> None:
    """The one copy into a client's memory that is not mapped. Raises InvalidArgument: the bytes are not there any more."""
    if isinstance(content, bytes):
        region.write(offset, content)
    elif content.nbytes:
        region.write(offset, np.ascontiguousarray(content).reshape(-1).view(np.uint8).data)


def _write(view: memoryview, content: Content) -> None:
    """The one copy on the way out."""
    if isinstance(content, bytes):
        view[:] = content
    elif isinstance(content, DeviceArray):
        content.copy_into(view)
    elif content.nbytes:
        np.copyto(np.frombuffer(view, content.dtype).reshape(content.shape), content)
