"""Makes one sealed memory of pushed parameters, whatever they come from (``tensord.shm.operations.ParameterSource``).

    file, region, memory, leaves ─▶ copied: nobody can change it any more ─▶ checked ─▶ sealed, whole, in safetensors' layout

A client may write to its region at any time, and take it away: what is looked at is always the copy. ``plan`` finds what a source
names, on the worker's loop; ``Making.make`` is for another thread.
"""

from __future__ import annotations

import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tensord.parameter_files import flat, load
from tensord.shm.arrays import DTYPES, Array
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.errors import InvalidArgument, NotFound
from tensord.shm.operations import (
    MAIN_SET,
    FileSource,
    LeafPlace,
    LeavesSource,
    MakeParameters,
    MemorySource,
    RegionSource,
)
from tensord.shm.regions import Region, check_range
from tensord.shm.snapshot_region import SnapshotRegion
from tensord.workers.devices.cuda_tensor import CudaTensor
from tensord.workers.parameters import layout
from tensord.workers.parameters.layout import LaidLeaf, NewMemory, SealedMemory
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.regions.region_table import AnyRegion, RegionTable, check_intact
from tensord.workers.regions.region_tensor import RegionTensor

#: Bytes that are copied in one piece: other threads may go on between two of them.
_PIECE = 4 << 20
_BYTES = np.dtype(np.uint8)
#: Copies bytes of a source, from one on, into an array of as many.
Copy = Callable[[int, Array], None]


class _Digest(Protocol):
    """A checksum under way."""

    def update(self, content: Any) -> None:
        """Adds bytes."""

    def hexdigest(self) -> str:
        """Returns the digits of it."""


class _Crc32:
    """CRC-32 as zlib counts it."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, content: Any) -> None:
        """Adds bytes."""
        self._value = zlib.crc32(content, self._value)

    def hexdigest(self) -> str:
        """Returns its eight digits."""
        return f"{self._value:08x}"


class Making:
    """Makes the sealed memory of one push. Whoever has it closes it, on the loop."""

    def __init__(self, operation: MakeParameters, limit: int, base: ParameterSet | None) -> None:
        """``base``: what has the leaves that the source lacks; None: the source is whole."""
        self._limit = limit
        self._base = base
        self._checksum = operation.checksum
        self._named = operation.set != MAIN_SET
        #: Names the parameters in errors.
        self.what = f"parameters for set '{operation.set}' of model '{operation.model}'"
        self._regions: list[AnyRegion] = []
        #: Reads the source whole, or leaf by leaf.
        self._read: Callable[[], Mapping[str, Array] | int] = dict
        self._fd = -1

    def lease(self, region: AnyRegion) -> None:
        """Notes a region that is read."""
        region.lease()
        self._regions.append(region)

    def reads(self, read: Callable[[Making], Mapping[str, Array] | int], fd: int = -1) -> None:
        """Sets what reads the source; ``fd`` is this object's from now on."""
        self._read = functools.partial(read, self)
        self._fd = fd

    def make(self) -> int:
        """Returns the descriptor of the sealed memory, the caller's. Raises ServingError: what is wrong."""
        made = self._read()
        if isinstance(made, int):
            if self._base is None:
                return made
            try:
                leaves: Mapping[str, Array] = layout.read(SealedMemory(made).view, self.what)
            finally:
                os.close(made)
        else:
            leaves = made
        return self._laid_out({**self._missing(leaves), **leaves})

    def _missing(self, leaves: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the base's leaves that a source lacks."""
        base = self._base
        if base is None:
            return {}
        base.sets.leaves.check_named()
        base.sets.leaves.check_known(leaves, self.what)
        return {
            leaf.name: array
            for leaf, array in zip(base.sets.leaves, base.hosted(), strict=True)
            if array is not None and leaf.name not in leaves and not (self._named and leaf.shared)
        }

    def _laid_out(self, leaves: Mapping[str, Array]) -> int:
        described = [LaidLeaf(name, array.dtype, tuple(array.shape)) for name, array in leaves.items()]
        memory, places = NewMemory.laid_out(described, self._limit, self.what)
        try:
            while places:
                name, place = places.popitem()
                np.copyto(place, leaves[name])
                # Nothing may refer to memory that is to be sealed.
                del place
            return memory.sealed()
        finally:
            memory.close()

    def copied(self, byte_size: int, copy: Copy, lies: memoryview | None = None) -> int:
        """Copies a whole source of so many bytes. Returns the descriptor of the sealed memory. Raises ServingError.

        Its header gets spaces behind it, so that its tensors are aligned: XLA then uses them there on a processor.

        ``lies``: the bytes, where they are in this process' memory.
        """
        layout.check_size(byte_size, self._limit, self.what)
        if not byte_size:
            raise InvalidArgument(f"{self.what} have no bytes")
        head = np.zeros(min(byte_size, layout.LENGTH), _BYTES)
        copy(0, head)
        spaces = layout.padding(head.tobytes(), byte_size)
        spaces = spaces if byte_size + spaces <= self._limit else 0
        length = int.from_bytes(head.tobytes(), "little")
        # Where no spaces are needed, or the header is none, all of it is behind the head.
        begin = len(head) + length if spaces else len(head)
        first = (length + spaces).to_bytes(layout.LENGTH, "little") if spaces else head.tobytes()
        if lies is not None:
            parts = [memoryview(first), lies[len(head) : begin], memoryview(b" " * spaces), lies[begin:]]
            memory = NewMemory(byte_size + spaces, [part for part in parts if part])
        else:
            memory = NewMemory(byte_size + spaces)
        try:
            if lies is None:
                memory.content[: len(head)] = np.frombuffer(first, _BYTES)
                copy(len(head), memory.content[len(head) : begin])
                memory.content[begin : begin + spaces] = ord(" ")
                copy(begin, memory.content[begin + spaces :])
            check_intact(self._regions)
            self.check_sum([head, memory.content[len(head) : begin], memory.content[begin + spaces :]])
            return memory.sealed()
        finally:
            memory.close()

    def leaves(self, places: Sequence[tuple[LaidLeaf, Copy]]) -> Mapping[str, Array]:
        """Copies leaves one by one. Raises ServingError."""
        found: dict[str, Array] = {}
        layout.check_size(sum([leaf.byte_size for leaf, _ in places]), self._limit, self.what)
        for leaf, copy in places:
            content = np.empty(leaf.byte_size, _BYTES)
            copy(0, content)
            array = content.view(leaf.dtype) if leaf.byte_size else np.empty(0, leaf.dtype)
            if leaf.dtype == np.bool_ and leaf.byte_size and content.max() > 1:
                raise InvalidArgument(f"{self.what}: leaf '{leaf.name}' has a truth value that is neither 0 nor 1")
            found[leaf.name] = array.reshape(leaf.shape)
        check_intact(self._regions)
        self.check_sum([array.reshape(-1).view(_BYTES) for array in found.values() if array.nbytes])
        return found

    def check_sum(self, contents: Iterable[Any]) -> None:
        """Raises InvalidArgument if a checksum was given, and is another one. ``contents``: the bytes, in their order."""
        kind, _, wanted = self._checksum.partition(":")
        if not kind:
            return
        digest: _Digest
        if kind == "sha256":
            digest = hashlib.sha256()
        elif kind == "crc32":
            digest = _Crc32()
        else:
            raise InvalidArgument(f"{self.what}: checksum '{kind[:32]}' is neither crc32 nor sha256")
        for content in contents:
            digest.update(content)
        if (found := digest.hexdigest()) != wanted.lower():
            raise InvalidArgument(f"{self.what}: their {kind} is {found}, {wanted[:128]} was given")

    def close(self) -> None:
        """Ends the use of regions, and closes the descriptor. Idempotent."""
        for region in self._regions:
            region.unlease()
        self._regions = []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __repr__(self) -> str:
        return f"<Making of {self.what}>"


def plan(
    operation: MakeParameters,
    folders: tuple[Path, Path],
    fd: int | None,
    regions: RegionTable,
    limit: int,
    base: ParameterSet | None,
) -> Making:
    """Finds what a source names.

    Args:
      folders: of the model's version, and of the model.
      fd: of a MemorySource; taken over where this returns.
      limit: bytes that one push may have.
      base: as in ``Making``.
    Raises: NotFound: no such region or file.  InvalidArgument: a range outside of it, or a path that leads elsewhere.
    """
    making, source = Making(operation, limit, base), operation.source
    try:
        if isinstance(source, FileSource):
            path = _path(source.path, folders)
            making.reads(lambda making: _from_file(making, path, limit))
        elif isinstance(source, RegionSource):
            region = regions.find(source.region)
            size = source.byte_size or max(0, region.byte_size - source.offset)
            copy = _copy_of(making, region, source.offset, size)
            given = region.view(source.offset, size) if isinstance(region, Region) else None
            making.reads(lambda making: making.copied(size, copy, given))
        elif isinstance(source, LeavesSource):
            if not source.leaves:
                raise InvalidArgument(f"{making.what} have no leaves")
            places = [_place(making, name, place, regions) for name, place in source.leaves.items()]
            making.reads(lambda making: making.leaves(places))
        elif fd is None:
            raise InvalidArgument(f"{making.what} came without their memory")
        else:
            making.reads(lambda making: _from_memory(making, source, fd), fd)
        return making
    except BaseException:
        making.close()
        raise


def _path(given: str, folders: tuple[Path, Path]) -> Path:
    """Returns a file or folder inside the model's folder. Raises InvalidArgument, NotFound."""
    asked = Path(given)
    if asked.is_absolute() or ".." in asked.parts or not asked.parts or "\0" in given:
        raise InvalidArgument(f"'{given[:256]}' is no path inside the model's folder")
    inside = folders[1].resolve()
    for folder in folders:
        path = folder / asked
        if path.exists():
            if not path.resolve().is_relative_to(inside):
                raise InvalidArgument(f"'{given[:256]}' leads out of the model's folder")
            return path
    raise NotFound(f"there is no '{given[:256]}' in the model's folder")


def _from_file(making: Making, path: Path, limit: int) -> Mapping[str, Array] | int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    layout.check_size(sum([file.stat().st_size for file in files]), limit, f"file '{path.name}' of {making.what}")
    if path.is_file():
        with open(path, "rb") as file:
            if path.suffix == ".safetensors":
                return making.copied(os.fstat(file.fileno()).st_size, _reading(file.fileno(), making.what))
            making.check_sum(iter(functools.partial(file.read, _PIECE), b""))
    try:
        found = flat(load(path))
        return {name: np.asarray(leaf) for name, leaf in found.items()}
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise InvalidArgument(f"{making.what}: {error}") from None


def _from_memory(making: Making, source: MemorySource, fd: int) -> int:
    """Copies memory that may still change; what is sealed, and is to be kept as it is, is only checked."""
    found = os.fstat(fd).st_size
    if found != source.byte_size:
        raise InvalidArgument(f"{making.what}: their memory has {found} bytes, {source.byte_size} were announced")
    layout.check_size(found, making._limit, making.what)
    if layout.is_sealed(fd):
        making.check_sum([SealedMemory(fd).view])
        return os.dup(fd)
    return making.copied(found, _reading(fd, making.what))


def _reading(fd: int, what: str) -> Copy:
    """Returns a function that copies a part of a file. It raises InvalidArgument: the file is too short by now."""

    def copy(at: int, target: Array) -> None:
        content, done = target.data, 0
        while done < len(content):
            count = os.preadv(fd, [content[done : done + _PIECE]], at + done)
            if not count:
                raise InvalidArgument(f"{what}: {at + done} bytes could be read, {at + len(content)} are needed")
            done += count

    return copy


def _place(making: Making, name: str, place: LeafPlace, regions: RegionTable) -> tuple[LaidLeaf, Copy]:
    """Returns a leaf in a region, and what copies it. Raises InvalidArgument, NotFound."""
    dtype = DTYPES.get(place.datatype)
    if dtype is None or dtype.hasobject:
        raise InvalidArgument(f"{making.what}: leaf '{name[:256]}' has datatype '{place.datatype[:32]}'")
    if any(size < 0 for size in place.shape) or len(place.shape) > layout.MAX_RANK:
        raise InvalidArgument(f"{making.what}: leaf '{name[:256]}' has shape {list(place.shape)[:64]}")
    leaf = LaidLeaf(name, dtype, place.shape)
    if leaf.byte_size != place.byte_size:
        raise InvalidArgument(
            f"{making.what}: leaf '{name[:256]}' has {place.byte_size} bytes, "
            f"{place.datatype}{list(place.shape)} needs {leaf.byte_size}"
        )
    return leaf, _copy_of(making, regions.find(place.region), place.offset, place.byte_size)


def _copy_of(making: Making, region: AnyRegion, offset: int, byte_size: int) -> Copy:
    """Returns a function that copies from a range of a region, which is leased. Raises InvalidArgument: it is not inside."""
    check_range(offset, byte_size, region.byte_size, region.name)
    making.lease(region)
    if isinstance(region, Region):
        view = region.view(offset, byte_size)

    def copy(at: int, target: Array) -> None:
        if isinstance(region, Region):
            for start in range(0, len(target), _PIECE):
                piece = target[start : start + _PIECE]
                np.copyto(piece, np.frombuffer(view[at + start : at + start + len(piece)], _BYTES))
        elif len(target) and isinstance(region, SnapshotRegion):
            RegionTensor(region, offset + at, _BYTES, (len(target),)).copy_into(target)
        elif len(target):
            assert isinstance(region, CudaRegion)
            CudaTensor(region, offset + at, _BYTES, (len(target),)).copy_into(target)

    return copy
