"""Checks a push of parameters before anything is done for it: names, numbers, sizes, the client's user, files and memory."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tensord.config import accounts, model_folder
from tensord.shm.errors import InvalidArgument, Unavailable, Unsupported
from tensord.shm.operations import FileSource, LeavesSource, MemorySource, Peer, PushParameters

#: A set's name goes into URLs, logs and metrics.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@-]{0,127}", re.ASCII)
_CHECKSUM = re.compile(r"crc32:[0-9a-fA-F]{8}|sha256:[0-9a-fA-F]{64}")
#: The smallest content: the length of the header, and an empty one.
_LEAST = 10
#: A number that a client gives is at most half of the highest that there is, so that higher ones are left for later pushes.
#: Nanoseconds since the epoch fit.
MAX_GIVEN_NUMBER = 1 << 62
#: Seals of memory that nobody can change any more.
_SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def check(wanted: PushParameters, memory: int, most: int) -> None:
    """Checks the fields of a push, and the memory that came with it.

    Args:
      wanted: the push.
      memory: the file descriptor that came with the push, or -1 if none came. Only a push with a MemorySource needs one.
      most: the most bytes that a push may have.
    Raises InvalidArgument if a field is malformed, or if a descriptor is missing or is not expected. Raises InvalidArgument if
    the memory is not a memfd of ordinary pages with an allowed size.
    """
    if not _NAME.fullmatch(wanted.set):
        raise InvalidArgument(
            f"no parameter set can be called '{wanted.set[:200]}': 1 to 128 letters, digits and _.,:+@- are expected"
        )
    if not 0 <= wanted.number <= MAX_GIVEN_NUMBER:
        raise InvalidArgument(
            f"number {wanted.number} of set '{wanted.set}' is no number of a push: they grow from 1 to {MAX_GIVEN_NUMBER}"
        )
    if wanted.checksum and not _CHECKSUM.fullmatch(wanted.checksum):
        raise InvalidArgument("a checksum is 'crc32:' with 8 or 'sha256:' with 64 hexadecimal digits")
    source = wanted.source
    if isinstance(source, MemorySource) != (memory >= 0):
        raise InvalidArgument("parameters that come as memory come with one descriptor, others with none")
    if isinstance(source, FileSource):
        path = PurePosixPath(source.path)
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in source.path:
            raise InvalidArgument(
                f"'{source.path[:200]}' is no file of the model: a path beneath its folder is expected"
            )
    elif isinstance(source, LeavesSource) and not source.leaves:
        raise InvalidArgument("a push has at least one leaf")
    elif memory >= 0:
        check_memory(memory, most)


def check_memory(memory: int, most: int) -> None:
    """Raises InvalidArgument unless the memory of a client is a memfd of ordinary pages with an allowed size.

    ``memory``: its file descriptor. ``most``: the most bytes that a push may have.
    """
    try:
        fcntl.fcntl(memory, fcntl.F_GET_SEALS)
        pages = os.fstatvfs(memory).f_bsize
    except OSError:
        raise InvalidArgument("the descriptor that came with a push is not a memfd") from None
    if pages != mmap.PAGESIZE:
        raise InvalidArgument(
            f"a memfd with pages of {pages} bytes came with a push, only {mmap.PAGESIZE} are accepted"
        )
    check_size(os.fstat(memory).st_size, most)


def check_size(byte_size: int, most: int) -> None:
    """Raises InvalidArgument if a push has more than ``most`` bytes, or too few for a file in safetensors' layout."""
    if byte_size > most:
        raise InvalidArgument(
            f"{byte_size} bytes of parameters are pushed, at most {most} are allowed (workers.max_parameter_byte_size)"
        )
    if byte_size < _LEAST:
        raise InvalidArgument(
            f"{byte_size} bytes are no parameters in safetensors' layout, which has {_LEAST} at least"
        )


def is_sealed(memory: int) -> bool:
    """Returns whether a memfd is sealed, so that no process can change its content or size any more."""
    return fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALED == _SEALED


def check_owner(owners: Sequence[str], peer: Peer) -> None:
    """Raises Unsupported if the client ``peer`` may not change parameters.

    A client on a Unix socket may change parameters if its user is in ``owners``, is root, or is the daemon's own user. Clients
    on other sockets are never refused. If ``owners`` is empty, no client is refused.
    """
    if peer.kind != "unix" or not owners or peer.uid in (0, os.geteuid()):
        return
    if peer.uid not in {accounts.user_id(owner) for owner in owners}:
        raise Unsupported(f"user {peer.uid} may not change parameters on this server (supervisor.parameter_owners)")


def fingerprint(folders: Sequence[Path], name: str) -> str:
    """Returns a digest of the inode, size and modification time of a file or, if ``name`` is a folder, of all files in it.

    The first of ``folders`` that has ``name`` counts. Returns "" if none has it.
    Raises Unavailable if the folder has too many files.
    """
    for folder in folders:
        path = folder / name
        found = hashlib.sha256()
        try:
            files = model_folder.walk(path) if path.is_dir() else [("", path.stat())]
            for count, (at, status) in enumerate(files, 1):
                if status is not None and not at.endswith("/"):
                    entry = f"{at} {status.st_ino} {status.st_size} {status.st_mtime_ns}\n"
                    found.update(entry.encode(errors="surrogateescape"))
                if count > model_folder.MAX_ENTRIES:
                    raise Unavailable(
                        f"'{name[:200]}' has more than {model_folder.MAX_ENTRIES} files, which are too many"
                    )
        except OSError:
            continue
        return found.hexdigest()
    return ""
