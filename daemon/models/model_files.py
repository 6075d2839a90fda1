"""The files of a model, as whoever loads it can read them: links are followed, and one that points nowhere is no file.

The fingerprint is made of this walk, so what a load would read differently is seen as a change: also the same link to another
release, whose files may have the same names, sizes and times. Reads no content: parameters may be gigabytes.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

#: What Python, file systems, network storage and archives leave beside anybody's files.
IGNORED = frozenset(("__pycache__", "lost+found", "@eaDir", "#recycle", "System Volume Information", "__MACOSX"))
#: A link may lead to all there is. Beyond so many files and folders of one model nobody looks.
MAX_ENTRIES = 100_000


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Returns whether an entry is a folder or a link to one; dangling and circular links are not. Raises OSError."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def fingerprints(path: Path, config: bytes, content: bytes) -> tuple[str, str]:
    """Two digests of the files that can be reached from a model's folder: with ``config``, and with ``content`` in its place.

    The first one changes when any file does; the second one not with ``config.pbtxt``, of which ``content`` says what counts.

    Raises OSError: it cannot be read.
    """
    all_of_it, rest = hashlib.sha256(config), hashlib.sha256(content)
    for name, identity in itertools.islice(_walk(path), MAX_ENTRIES):
        entry = f"{name}\0{identity}\0".encode(errors="surrogateescape")
        all_of_it.update(entry)
        if name != "config.pbtxt":
            rest.update(entry)
    return all_of_it.hexdigest(), rest.hexdigest()


def _walk(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Files by their paths beneath ``path`` and what tells one from another, in order. No folder is entered twice."""
    met: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        at = waiting.pop()
        try:
            folder = os.stat(path / at)
            names = sorted(name for name in os.listdir(path / at) if name not in IGNORED)
        except OSError:
            if not at:
                raise
            continue  # it went meanwhile, or nobody may enter: the loader cannot either
        # Its own times say nothing: Python's cache in it is not looked at.
        identity = (folder.st_dev, folder.st_ino)
        yield f"{at}/", identity
        if identity in met:
            continue  # a second link to it, or one that leads back to where it lies
        met.add(identity)
        below: list[str] = []
        for name in names:
            place = os.path.join(at, name)
            try:
                status = os.stat(path / place)
            except OSError:
                continue  # a link to nowhere, such as an editor's lock
            if stat.S_ISDIR(status.st_mode):
                below.append(place)
            else:
                yield place, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        waiting += reversed(below)
