"""Lists and opens files in a model's folder.

Backup copies that an editor makes, and similar files, are not listed. Only regular files are opened. If the folder of a model
version has no model.py, the version consists of at least one program and at most one file or folder of parameters:

    *.jaxexport             a program: the bytes that Exported.serialize() of jax.export returned
    *.stablehlo, *.mlir     a program: a StableHLO module as text, as bytecode, or as a portable artifact
    params.safetensors, params.npz, params.msgpack, params/ (an Orbax folder)     the parameters
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

EXPORTED = ".jaxexport"
STABLEHLO = (".stablehlo", ".mlir")
_PARAMETERS = ("params.safetensors", "params.npz", "params.msgpack", "params")
#: A link may lead anywhere. Only so many files and folders of one model are looked at.
MAX_ENTRIES = 100_000
#: Names that Python, file systems, network storage and archives leave beside anybody's files.
_LEFT_BESIDE = frozenset(
    ("__pycache__", "lost+found", "@eaDir", "#recycle", "System Volume Information", "__MACOSX", ".DS_Store")
)
#: Names of files that are no part of a model: those that a Mac stores beside each file on other file systems; locks, copies and
#: unsaved changes of Emacs and vim; and those that NFS gives to a file that was removed while it was open.
_LEFT_OVER = re.compile(r"\._.*|\.#.*|#.*#|.*~|\..*\.sw[a-z]|\.nfs[0-9a-f]{8,}", re.DOTALL)


def is_passed_over(name: str) -> bool:
    """Returns whether a file or folder of this name is never part of a model."""
    return name in _LEFT_BESIDE or _LEFT_OVER.fullmatch(name) is not None


def walk(path: Path) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yields the path and status of the folder ``path`` and of everything below it, in a fixed order.

    Each path is relative to ``path``. A folder's path ends with a slash, and the first path is "/". The status of a dangling
    link is None. No folder is entered twice, even if links lead to it. Raises OSError if ``path`` cannot be read.
    """
    met: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        at = waiting.pop()
        try:
            folder = os.stat(path / at)
            names = sorted(name for name in os.listdir(path / at) if not is_passed_over(name))
        except OSError:
            if not at:
                raise
            continue  # it went meanwhile, or nobody may enter: the loader cannot either
        yield f"{at}/", folder
        identity = (folder.st_dev, folder.st_ino)
        if identity in met:
            continue  # a second link to it, or one that leads back to where it lies
        met.add(identity)
        below: list[str] = []
        for name in names:
            place = os.path.join(at, name)
            try:
                status = os.stat(path / place)
            except OSError:
                yield place, None
                continue
            if stat.S_ISDIR(status.st_mode):
                below.append(place)
            else:
                yield place, status
        waiting += reversed(below)


def regular(path: str, flags: int) -> int:
    """Opens a regular file, for ``open(path, opener=regular)``. Raises OSError if the file is not a regular one."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def programs(folder: Path) -> list[Path]:
    """Returns the program files in a version's folder, sorted by name. The list is empty if the folder does not exist."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in (EXPORTED, *STABLEHLO) and path.is_file() and not is_passed_over(path.name)
    )


def parameters(folder: Path) -> list[Path]:
    """Returns the paths of parameter files and of ``params/`` in a model version's folder. A valid version has at most one."""
    return [path for name in _PARAMETERS if (path := folder / name).exists()]
