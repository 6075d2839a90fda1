"""Copies the parameters of a push from files, regions or a memfd into one sealed memory, in the layout of a safetensors file.

A client may change or remove its region at any time. So parameters are first copied from the region, and then the copy is
checked and sealed. A memfd that is already sealed is used without a copy, unless the push takes missing leaves from another
parameter set.

The worker's event loop calls ``plan``, which finds the source of a push. Another thread calls ``Making.make``, which copies.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensord.config import model_folder
from tensord.parameter_files import flat, load
from tensord.shm.arena import ALIGNMENT
from tensord.shm.arrays import DTYPES, Array
from tensord.shm.cuda_regions import CudaRegion
from tensord.shm.datatypes import element_count
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
from tensord.shm.regions import Region, SnapshotRegion, check_range
from tensord.workers.devices.late_tensor import CudaTensor, RegionTensor
from tensord.workers.parameters import layout
from tensord.workers.parameters.layout import LaidLeaf, leaf_of
from tensord.workers.parameters.leaves import Leaves
from tensord.workers.parameters.parameter_set import ParameterSet
from tensord.workers.parameters.sealed_memory import Copy, MemoryPool, Part, SealedMemory, is_sealed, part_of
from tensord.workers.regions.region_table import AnyRegion, RegionTable, check_intact

#: Bytes of a file that are read in one piece.
_PIECE = 4 << 20
_BYTES = np.dtype(np.uint8)


class Making:
    """Copies the parameters of one push into sealed memory.

    The method ``make`` copies the parameters. At the end, the owner must call ``close`` on the worker's event loop.
    """

    def __init__(
        self, operation: MakeParameters, pool: MemoryPool, limit: int, leaves: Leaves, base: ParameterSet | None
    ) -> None:
        """Stores the arguments, which ``plan`` explains. The method ``make`` copies the parameters."""
        self._pool = pool
        self._leaves = leaves
        self._limit = limit
        self._base = base
        self._checksum = operation.checksum
        self._named = operation.set != MAIN_SET
        #: Names the parameters in errors.
        self.what = f"parameters for set '{operation.set}' of model '{operation.model}'"
        self._regions: list[AnyRegion] = []
        #: Reads the source. Returns leaf name -> array, or the file descriptor of sealed memory with all its leaves.
        self.read: Callable[[], Mapping[str, Array] | int] = dict
        #: A file descriptor that is closed with this object; -1: there is none.
        self.fd = -1

    def lease(self, region: AnyRegion) -> None:
        """Keeps ``region`` open until ``close`` is called, because this object copies parameters from the region."""
        region.lease()
        self._regions.append(region)

    def make(self) -> int:
        """Copies the source of the push into sealed memory. Returns the memory's file descriptor, which the caller closes.

        Raises ServingError: the source cannot be read, or is not valid.
        """
        made = self.read()
        if isinstance(made, int):
            if self._base is None:
                return made
            try:
                leaves: Mapping[str, Array] = layout.read(SealedMemory(made).view, self.what, self._leaves)
            finally:
                os.close(made)
        else:
            leaves = made
        described = [leaf_of(name, array) for name, array in {**self._missing(leaves), **leaves}.items()]
        return self._pool.sealed(layout.laid_out(described, self._limit, self.what))

    def _missing(self, leaves: Mapping[str, Array]) -> dict[str, Array]:
        base = self._base
        if base is None:
            return {}
        self._leaves.check_known(leaves, self.what)
        return {
            leaf.name: array
            for leaf, array in zip(base.sets.leaves, base.hosted(), strict=True)
            if array is not None and leaf.name not in leaves and not (self._named and leaf.shared)
        }

    def copied(self, byte_size: int, copy: Copy) -> int:
        """Copies pushed safetensors content into sealed memory. Returns the memory's file descriptor, which the caller closes.

        ``byte_size``: the size of the content. ``copy(at, target)`` fills the array ``target`` with the content from byte
        ``at`` on. Raises InvalidArgument: the content is not valid, too large, or shorter than ``byte_size``, or the pushed
        checksum is wrong. Raises Unavailable: the host lacks memory.
        """
        layout.check_size(byte_size, self._limit, self.what)
        # The header first: where it is malformed, or its leaves are not the model's, nothing else is copied.
        head = self._read_from(copy, 0, min(byte_size, layout.LENGTH))
        length = layout.header_length(head, byte_size, self.what, self._leaves)
        begin = layout.LENGTH + length
        header = self._read_from(copy, layout.LENGTH, length)
        layout.places(header, byte_size, self.what, self._leaves)
        # Spaces behind the header align the tensors: XLA then uses them without a copy on a processor.
        spaces = -begin % ALIGNMENT
        spaces = spaces if byte_size + spaces <= self._limit else 0
        first = (length + spaces).to_bytes(layout.LENGTH, "little")
        tensors = Part(byte_size - begin, lambda at, target: copy(begin + at, target))

        def check(content: Array) -> None:
            check_intact(self._regions)
            self.check_sum([head, header, content[begin + spaces :]])

        return self._pool.sealed([*map(part_of, (first, header, b" " * spaces)), tensors], check)

    def _read_from(self, copy: Copy, offset: int, byte_size: int) -> bytes:
        found = np.zeros(byte_size, _BYTES)
        copy(offset, found)
        check_intact(self._regions)
        return found.tobytes()

    def leaves(self, places: Sequence[tuple[LaidLeaf, Copy]]) -> int:
        """Copies pushed parameters into sealed memory. Returns the memory's file descriptor, which the caller closes.

        ``places``: each leaf, and the function that copies the leaf's bytes.
        Raises InvalidArgument if the parameters are too large or unknown to the model, if the pushed checksum is wrong, or if
        the client has removed the region with the parameters.
        """
        self._leaves.check_known({leaf.name: leaf for leaf, _ in places}, self.what)

        def check(content: Array) -> None:
            check_intact(self._regions)
            self.check_sum(self._contents(content, places))

        return self._pool.sealed(layout.laid_out(places, self._limit, self.what), check)

    def _contents(self, content: Array, places: Sequence[tuple[LaidLeaf, Copy]]) -> Iterator[Array]:
        found = layout.read(content.data, self.what)
        for leaf, _ in places:
            if leaf.byte_size:
                yield found[leaf.name].reshape(-1).view(_BYTES)

    def check_sum(self, contents: Iterable[Any]) -> None:
        """Raises InvalidArgument if the push has a checksum that differs from the checksum of ``contents``."""
        kind, _, wanted = self._checksum.partition(":")
        if not kind:
            return
        if kind == "sha256":
            digest = hashlib.sha256()
            for content in contents:
                digest.update(content)
            found = digest.hexdigest()
        elif kind == "crc32":
            found = f"{functools.reduce(lambda value, content: zlib.crc32(content, value), contents, 0):08x}"
        else:
            raise InvalidArgument(f"{self.what}: checksum '{kind[:32]}' is neither crc32 nor sha256")
        if found != wanted.lower():
            raise InvalidArgument(f"{self.what}: their {kind} is {found}, {wanted[:128]} was given")

    def close(self) -> None:
        """Closes the file descriptor that came with the push, if any. Ends the leases of the regions with pushed values."""
        for region in self._regions:
            region.unlease()
        self._regions = []
        self.read = dict
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __repr__(self) -> str:
        return f"<Making of {self.what}>"


def plan(
    operation: MakeParameters,
    folders: tuple[Path, Path],
    fd: int | None,
    regions: RegionTable,
    pool: MemoryPool,
    limit: int,
    leaves: Leaves,
    base: ParameterSet | None,
) -> Making:
    """Returns an object whose method ``make`` copies the parameters of a push from a file, from regions or from a memfd.

    Args:
      operation: the push. It says where the parameters are.
      folders: the folder of the model's version, and the folder of the model. A pushed file lies in one of them.
      fd: the memfd that has the parameters, which the method ``close`` of the returned object closes; None: there is no memfd.
      regions: the worker's regions.
      pool: allocates the memory to which ``make`` copies.
      limit: the most bytes that the push may have.
      leaves: describes the leaves of the model's parameters.
      base: a parameter set, from which leaves are taken that the push lacks; None: the push must have all leaves.
    Raises NotFound: a region or file that the push names does not exist.
    Raises InvalidArgument: a range lies outside of its region, a path leads out of the model's folder, the memfd is missing, or
    a leaf's datatype, shape and number of bytes do not agree.
    """
    making, source = Making(operation, pool, limit, leaves, base), operation.source
    try:
        if isinstance(source, FileSource):
            path = _path(source.path, folders)
            making.read = functools.partial(_from_file, making, path, limit)
        elif isinstance(source, RegionSource):
            region = regions.find(source.region)
            size = source.byte_size or max(0, region.byte_size - source.offset)
            copy = _copy_of(making, region, source.offset, size)
            making.read = functools.partial(making.copied, size, copy)
        elif isinstance(source, LeavesSource):
            if not source.leaves:
                raise InvalidArgument(f"{making.what} have no leaves")
            places = [_place(making, name, place, regions) for name, place in source.leaves.items()]
            making.read = functools.partial(making.leaves, places)
        elif fd is None:
            raise InvalidArgument(f"{making.what} came without their memory")
        else:
            making.fd = fd
            making.read = functools.partial(_from_memory, making, source, fd)
        return making
    except BaseException:
        making.close()
        raise


def _path(relative: str, folders: tuple[Path, Path]) -> Path:
    asked = Path(relative)
    if asked.is_absolute() or ".." in asked.parts or not asked.parts or "\0" in relative:
        raise InvalidArgument(f"'{relative[:256]}' is no path inside the model's folder")
    inside = folders[1].resolve()
    for folder in folders:
        path = folder / asked
        # Path.exists() fails for a name that is longer than names can be.
        if os.path.exists(path):
            if not path.resolve().is_relative_to(inside):
                raise InvalidArgument(f"'{relative[:256]}' leads out of the model's folder")
            return path
    raise NotFound(f"there is no '{relative[:256]}' in the model's folder")


def _from_file(making: Making, path: Path, limit: int) -> Mapping[str, Array] | int:
    try:
        if path.is_dir():
            there = itertools.islice(model_folder.walk(path), model_folder.MAX_ENTRIES)
            byte_size = sum([status.st_size for name, status in there if status is not None and name[-1:] != "/"])
            layout.check_size(byte_size, limit, f"file '{path.name}' of {making.what}")
        else:
            with open(path, "rb", opener=model_folder.regular) as file:
                byte_size = os.fstat(file.fileno()).st_size
                layout.check_size(byte_size, limit, f"file '{path.name}' of {making.what}")
                if path.suffix == ".safetensors":
                    return making.copied(byte_size, _reading(file.fileno(), making.what))
                making.check_sum(iter(functools.partial(file.read, _PIECE), b""))
        found = flat(load(path))
        return {name: np.asarray(leaf) for name, leaf in found.items()}
    except (ValueError, ModuleNotFoundError) as error:
        raise InvalidArgument(f"{making.what}: {error}") from None
    except OSError as error:
        raise InvalidArgument(f"{making.what}: {path.name} cannot be read: {error.strerror}") from None


def _from_memory(making: Making, source: MemorySource, fd: int) -> int:
    found = os.fstat(fd).st_size
    if found != source.byte_size:
        raise InvalidArgument(f"{making.what}: their memory has {found} bytes, {source.byte_size} were announced")
    layout.check_size(found, making._limit, making.what)
    if is_sealed(fd):
        memory = SealedMemory(fd).view
        layout.read(memory, making.what, making._leaves)
        making.check_sum([memory])
        return os.dup(fd)
    return making.copied(found, _reading(fd, making.what))


def _reading(fd: int, what: str) -> Copy:
    def copy(at: int, target: Array) -> None:
        content, done = target.data, 0
        while done < len(content):
            count = os.preadv(fd, [content[done:]], at + done)
            if not count:
                raise InvalidArgument(f"{what}: {at + done} bytes could be read, {at + len(content)} are needed")
            done += count

    return copy


def _place(making: Making, name: str, place: LeafPlace, regions: RegionTable) -> tuple[LaidLeaf, Copy]:
    dtype = DTYPES.get(place.datatype)
    if dtype is None or dtype.hasobject:
        raise InvalidArgument(f"{making.what}: leaf '{name[:256]}' has datatype '{place.datatype[:32]}'")
    element_count(place.shape, f"{making.what}: leaf '{name[:256]}'")
    leaf = LaidLeaf(name, dtype, place.shape)
    if leaf.byte_size != place.byte_size:
        raise InvalidArgument(
            f"{making.what}: leaf '{name[:256]}' has {place.byte_size} bytes, "
            f"{place.datatype}{list(place.shape)} needs {leaf.byte_size}"
        )
    return leaf, _copy_of(making, regions.find(place.region), place.offset, place.byte_size)


def _copy_of(making: Making, region: AnyRegion, offset: int, byte_size: int) -> Copy:
    check_range(offset, byte_size, region.byte_size, region.name)
    making.lease(region)
    if isinstance(region, Region):
        view = region.view(offset, byte_size)

    def copy(at: int, target: Array) -> None:
        if isinstance(region, Region):
            np.copyto(target, np.frombuffer(view[at : at + len(target)], _BYTES))
        elif len(target) and isinstance(region, SnapshotRegion):
            RegionTensor(region, offset + at, _BYTES, (len(target),)).copy_into(target)
        elif len(target):
            assert isinstance(region, CudaRegion)
            CudaTensor(region, offset + at, _BYTES, (len(target),)).copy_into(target)

    return copy
