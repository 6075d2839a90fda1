"""Unpacks an archive that holds a model: writes nothing outside of the folder, and limits the number and size of files."""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from tensord.config.model_folder import MAX_ENTRIES, is_passed_over
from tensord.daemon.models import repository
from tensord.shm.errors import InvalidArgument

ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")


def unpack(archive: Path, name: str, folder: Path, max_byte_size: int) -> None:
    """Unpacks an archive of this name into ``folder``, which must not exist yet; a single folder in it becomes ``folder``.

    ``max_byte_size``: of all files in the archive together. Raises InvalidArgument: the archive is damaged, too large, or has
    members that are not allowed; OSError: a file cannot be written.
    """
    left = max_byte_size
    folder.mkdir()
    try:
        members = _zipped(archive) if name.lower().endswith(".zip") else _tarred(archive)
        for count, (member, mode, opens) in enumerate(members):
            if count == MAX_ENTRIES:
                raise InvalidArgument(f"'{name}' has more than {MAX_ENTRIES} files, as many as a model has")
            parts = member.removeprefix("./").rstrip("/").split("/")
            if is_left_out(parts):
                continue
            place = folder.joinpath(*parts)
            if stat.S_ISDIR(mode):
                place.mkdir(parents=True, exist_ok=True)
                continue
            if (opened := opens()) is None:
                raise InvalidArgument(f"'{member}' of '{name}' is neither a file nor a folder nor leads to one in it")
            place.parent.mkdir(parents=True, exist_ok=True)
            with opened, open(place, "wb") as file:
                while block := opened.read(1 << 20):
                    left -= file.write(block)
                    if left < 0:
                        raise InvalidArgument(
                            f"'{name}' has {max_byte_size - left} bytes up to '{member}'; --max-byte-size is {max_byte_size}"
                        )
                os.fchmod(file.fileno(), 0o755 if mode & 0o100 else 0o644)
    except InvalidArgument:
        raise
    except Exception as error:  # of a format, or of what it is compressed with
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidArgument(f"'{name}' cannot be unpacked: {' '.join(str(error).split())}") from error
    if len(names := os.listdir(folder)) == 1 and repository.no_model(folder) and (folder / names[0]).is_dir():
        outer = folder.rename(folder.with_name(f"{folder.name}.outer"))
        (outer / names[0]).rename(folder)


def _tarred(archive: Path) -> Iterator[tuple[str, int, Callable[[], IO[bytes] | None]]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            # A link is written as what it leads to in the archive.
            yield member.name, stat.S_IFDIR if member.isdir() else member.mode, partial(tar.extractfile, member)
        # tarfile stops at its own end; the compressed stream's, with its checksum, comes after it.
        while tar.fileobj is not None and tar.fileobj.read(1 << 20):
            pass


def _zipped(archive: Path) -> Iterator[tuple[str, int, Callable[[], IO[bytes] | None]]]:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.infolist():
            mode = stat.S_IFDIR if member.is_dir() else member.external_attr >> 16
            yield member.filename, mode, (lambda: None) if stat.S_ISLNK(mode) else partial(opened.open, member)


def is_left_out(parts: Sequence[str]) -> bool:
    """Returns whether the path of a file at the source is no part of a model, such as what other programs leave in folders.

    Raises InvalidArgument: the path leads out of the model's folder on some operating system.
    """
    if any(part in ("..", "") or "\\" in part or "\0" in part for part in parts) and parts != [""]:
        raise InvalidArgument(f"'{'/'.join(parts)}' is no path in a model's folder")
    return any(map(is_passed_over, parts))
