"""Unpacks an archive that holds a model: no member is written outside of the folder, and their number and size are limited."""

from __future__ import annotations

import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path

from tensord.daemon.fetching.source import is_inside
from tensord.daemon.models import repository
from tensord.shm.errors import InvalidArgument

_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    NotImplementedError,
    RuntimeError,
)


def unpack(archive: Path, name: str, folder: Path, max_byte_size: int) -> None:
    """Unpacks an archive into ``folder``, which must not exist yet.

    If the archive contains the model in a folder, that folder's contents become ``folder``'s.

    Args:
      name: the archive's file name, whose ending tells the format; it also appears in error messages.
      max_byte_size: how many bytes all files in the archive together may have.

    Raises InvalidArgument: the archive is damaged, too large, or has members that are not allowed; OSError: a file cannot be
    written.
    """
    if not hasattr(tarfile, "data_filter"):
        raise InvalidArgument("archives are unpacked safely by Python 3.11.4 and newer")
    folder.mkdir()
    bounds = _Bounds(name, max_byte_size)
    try:
        if name.lower().endswith(".zip"):
            _unpack_zip(archive, folder, bounds)
        else:
            _unpack_tar(archive, folder, bounds)
    except _BROKEN as error:
        raise InvalidArgument(f"'{name}' cannot be unpacked: {' '.join(str(error).split())}") from error
    _lift(folder)


class _Bounds:
    """Counts the members of an archive and their bytes. ``add`` raises InvalidArgument at the first member beyond a limit."""

    def __init__(self, name: str, max_byte_size: int) -> None:
        self._name, self._max_byte_size = name, max_byte_size
        self._members = self._byte_size = 0

    def add(self, member: str, byte_size: int) -> None:
        self._members += 1
        self._byte_size += byte_size
        if self._members > repository.MAX_ENTRIES:
            raise InvalidArgument(
                f"'{self._name}' has more than {repository.MAX_ENTRIES} files, as many as a model has"
            )
        if self._byte_size > self._max_byte_size:
            raise InvalidArgument(
                f"'{self._name}' has {self._byte_size} bytes up to '{member}'; --max-byte-size is {self._max_byte_size}"
            )


def _unpack_tar(archive: Path, folder: Path, bounds: _Bounds) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            bounds.add(member.name, member.size if member.isreg() else 0)
            # Refuses devices and what leads out of the folder, and takes the owner and special bits away.
            tar.extract(member, folder, filter="data")
        # tarfile stops at its own end; the compressed stream's, with its checksum, comes after it.
        assert tar.fileobj is not None
        while tar.fileobj.read(1 << 20):
            pass


def _unpack_zip(archive: Path, folder: Path, bounds: _Bounds) -> None:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            bounds.add(member.filename, member.file_size)
            if not is_inside(member.filename.rstrip("/")):
                raise InvalidArgument(f"'{member.filename}' is no path in a model's folder")
            if stat.S_ISLNK(member.external_attr >> 16):
                raise InvalidArgument(
                    f"'{member.filename}' is a link, which tensord fetch does not take from a zip file"
                )
            opened.extract(member, folder)


def _lift(folder: Path) -> None:
    """Replaces ``folder`` by the only folder inside it, unless ``folder`` is itself a model's or contains anything else."""
    names = [name for name in os.listdir(folder) if name not in repository.IGNORED]
    if len(names) == 1 and repository.no_model(folder) and (folder / names[0]).is_dir():
        aside = folder.with_name(f"{folder.name}.outer")
        folder.rename(aside)
        (aside / names[0]).rename(folder)
