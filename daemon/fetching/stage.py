"""The stage: a model that is being fetched into a repository, in a folder next to it that scans of the repository ignore.

    REPOSITORY/.NAME.fetch/
        lock          locked by the process that fetches
        plan.json     where it comes from, with the size and identity of each file; without it nothing here counts
        archive       as far as it has come
        NAME/         the model, as far as it has come
    REPOSITORY/NAME/  what daemons serve: exchanged with the staged model by one rename, when that is complete and checked

A fetch that is killed leaves the stage. The next fetch continues each file that has not changed at its source. Files are written
in order, so the bytes that exist of a file are its beginning.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from tensord.daemon.fetching import archive
from tensord.daemon.fetching.source import RECORD, File, Source
from tensord.daemon.models.repository import NAME
from tensord.shm.errors import InvalidArgument, Unavailable

#: A list of checksums in a model's folder, as ``sha256sum`` writes it.
SUMS = "SHA256SUMS"
_ARCHIVE = "archive"
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_MAX_SUMS_BYTE_SIZE = 64 << 20
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


class Plan(msgspec.Struct, frozen=True):
    """Lists the files of a model that are to be fetched from a URL."""

    url: str
    #: Whether the only file is an archive of the model.
    archive: bool
    files: tuple[File, ...]

    def same(self, other: Plan | None) -> bool:
        """Returns whether another plan is known to have the same content; False also if a file has no tag or hash to tell."""
        return self == other and all(file.identity for file in self.files)


class Stage:
    """A locked folder next to a model's folder, in which a model is downloaded and checked before it replaces the served one.

    Use it as a context manager, which unlocks it at the end; no other process can fetch the model until then.
    """

    def __init__(self, folder: Path) -> None:
        """Creates and locks the stage. ``folder``: the model's folder in its repository, which need not exist.

        Raises InvalidArgument: the folder's name cannot be a model's, or another process is fetching the model; OSError: the
        stage cannot be created.
        """
        self.folder = folder.absolute()
        if not NAME.fullmatch(self.folder.name):
            raise InvalidArgument(
                f"'{self.folder.name}' cannot be a model's name: letters, digits and _.,+- of which . + and - do not begin it"
            )
        self._path = self.folder.with_name(f".{self.folder.name}.fetch")
        #: The staged model; it has the name of the one that is served.
        self.model = self._path / self.folder.name
        self._path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed the folder that it lies in.
            if os.stat(self._path / "lock").st_ino != os.fstat(self._lock).st_ino:
                raise FileNotFoundError
        except OSError:
            os.close(self._lock)
            raise InvalidArgument(f"model '{self.folder.name}' is being fetched by another process") from None

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def holds(self, plan: Plan) -> bool:
        """Returns whether the model in its folder was fetched by a plan with the same content, so that no fetch is needed."""
        return plan.same(_read(self.folder / RECORD))

    def fill(self, source: Source, plan: Plan, max_byte_size: int) -> Iterator[int]:
        """Downloads what is missing of the plan's files in the stage's folder; yields how many of their bytes are there so far.

        Raises InvalidArgument: the model is too large; Unavailable: a file could not be read, or has changed meanwhile; OSError:
        a file cannot be written.
        """
        before = _read(self._path / "plan.json")
        kept = set() if before is None or before.url != plan.url else {file for file in before.files if file.identity}
        self._discard({*(file.name for file in plan.files if file in kept)})
        files = [file for file in plan.files if not file.name.endswith("/")]
        places = {file: self._path / _ARCHIVE if plan.archive else self.model / file.name for file in files}
        begun = [(file, _begun(places[file], file.byte_size)) for file in files]
        self._check_room(begun, max_byte_size)
        _write(self._path / "plan.json", plan)
        for file in plan.files:
            if file.name.endswith("/"):
                (self.model / file.name).mkdir(parents=True, exist_ok=True)
        there = sum(begin for _, begin in begun)
        yield there
        wanted = [(file, begin) for file, begin in begun if begin != file.byte_size or not places[file].exists()]
        with contextlib.ExitStack() as stack:
            at: File | None = None
            opened: IO[bytes] | None = None
            for file, begin, block in source.blocks(wanted):
                if file != at or opened is None:
                    stack.close()
                    opened = stack.enter_context(_opened(places[file], file.byte_size))
                    stack.callback(_sync, opened)
                    at = file
                if opened.tell() != begin:
                    # It comes from its beginning, though a part of it was there.
                    there -= opened.tell() - begin
                    opened.seek(begin)
                    opened.truncate()
                opened.write(block)
                there += len(block)
                if there > max_byte_size:
                    raise InvalidArgument(f"{source.shown}: it has more than {max_byte_size} bytes (--max-byte-size)")
                yield there
        again = source.files()
        if [replace(file, byte_size=0) for file in again] != [replace(file, byte_size=0) for file in plan.files]:
            raise Unavailable(f"{source.shown}: it has changed while it was fetched; fetch it again")

    def complete(self, source: Source, plan: Plan, sha256: str, max_byte_size: int) -> None:
        """Turns the fetched files into the staged model: verifies checksums, and unpacks an archive.

        ``sha256``: the expected checksum of the archive, or of the folder's list of checksums; "": none is expected.

        Raises InvalidArgument: a checksum is wrong, or the archive is damaged; the fetched files are removed then. OSError: a
        file cannot be written.
        """
        try:
            if source.is_archive:
                if sha256:
                    _check_sum(self._path / _ARCHIVE, plan.files[0].name, sha256)
                self._remove(self.model)
                self._remove(self.model.with_name(f"{self.model.name}.outer"))
                archive.unpack(self._path / _ARCHIVE, plan.files[0].name, self.model, max_byte_size)
            _check_sums(self.model, "" if source.is_archive else sha256)
        except InvalidArgument:
            self._discard(set())
            raise
        _write(self.model / RECORD, plan)

    def swap(self) -> None:
        """Replaces the served model with the staged one by one rename, and removes the former model and the stage.

        On a file system that cannot exchange two folders it takes two renames: for an instant no folder has the name, which a
        daemon that polls ignores. Raises OSError: a rename failed; the former model is still served.
        """
        # What will lie here is no beginning of anything.
        (self._path / "plan.json").unlink(missing_ok=True)
        if not os.path.lexists(self.folder):
            self.model.rename(self.folder)
        elif not _exchanged(self.model, self.folder):
            aside = self._path / "former"
            self._remove(aside)
            self.folder.rename(aside)
            try:
                self.model.rename(self.folder)
            except BaseException:
                aside.rename(self.folder)
                raise
        descriptor = os.open(self.folder.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.clear()

    def clear(self) -> None:
        """Removes the stage's folder with all that was fetched, and the lock in it."""
        shutil.rmtree(self._path, ignore_errors=True)

    def _check_room(self, begun: Sequence[tuple[File, int]], max_byte_size: int) -> None:
        whole = sum(max(0, file.byte_size) for file, _ in begun)
        if whole > max_byte_size:
            raise InvalidArgument(f"the model has {whole} bytes; --max-byte-size is {max_byte_size}")
        missing, free = whole - sum(begin for _, begin in begun), shutil.disk_usage(self._path).free
        if missing > free:
            raise InvalidArgument(f"{missing} bytes are to come; '{self.folder.parent}' has room for {free}")

    def _discard(self, kept: set[str]) -> None:
        """Removes the fetched files from the stage, except those with the names in ``kept``."""
        for entry in os.listdir(self._path):
            if entry != "lock" and not (kept and entry in (_ARCHIVE, self.model.name)):
                self._remove(self._path / entry)
        for parent, folders, names in os.walk(self.model, topdown=False):
            for name in names:
                path = Path(parent, name)
                if str(path.relative_to(self.model)) not in kept:
                    path.unlink()
            for name in folders:
                # An empty folder may be a version.
                with contextlib.suppress(OSError):
                    os.rmdir(Path(parent, name))

    def _remove(self, path: Path) -> None:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def _begun(place: Path, byte_size: int) -> int:
    """Returns how many bytes of a file exist already; 0 if the file is longer than it should be, so that it is begun anew."""
    try:
        there = os.lstat(place).st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return there if there <= byte_size else 0


def _opened(place: Path, byte_size: int) -> IO[bytes]:
    """Opens a file for writing behind the bytes that exist already; it is emptied if it has more than ``byte_size`` of them."""
    begun = _begun(place, byte_size)
    place.parent.mkdir(parents=True, exist_ok=True)
    opened = open(place, "r+b" if begun else "wb")  # noqa: SIM115
    opened.seek(begun)
    return opened


def _sync(opened: IO[bytes]) -> None:
    opened.flush()
    os.fsync(opened.fileno())


def _exchanged(one: Path, other: Path) -> bool:
    """Exchanges two folders by one rename. Returns False if the file system or the C library cannot.

    Raises OSError: the rename failed.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if not rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _read(path: Path) -> Plan | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, plan: Plan) -> None:
    """Writes a plan to a new file and renames that to ``path``, so that the file at ``path`` is never incomplete."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(msgspec.json.encode(plan))
    beside.rename(path)


def _check_sums(model: Path, sha256: str) -> None:
    """Checks a model's files against its list of checksums, if it has one: the files must be exactly those listed.

    ``sha256``: the expected checksum of the list itself; "": not checked.

    Raises InvalidArgument: a checksum is wrong, or the list or a file is missing, unexpected or malformed.
    """
    listed = model / SUMS
    if not listed.is_file():
        if sha256:
            raise InvalidArgument(f"--sha256 of a folder is that of its {SUMS}, which it does not have")
        return
    if sha256:
        _check_sum(listed, SUMS, sha256)
    if listed.stat().st_size > _MAX_SUMS_BYTE_SIZE:
        raise InvalidArgument(f"{SUMS} has {listed.stat().st_size} bytes, more than {_MAX_SUMS_BYTE_SIZE}")
    sums: dict[str, str] = {}
    for number, line in enumerate(listed.read_text(errors="surrogateescape").splitlines(), 1):
        found = _SUM.fullmatch(line)
        if not found:
            raise InvalidArgument(f"{SUMS}: line {number} is no checksum and name")
        sums[os.path.normpath(found[2])] = found[1]
    there = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()} - {SUMS, RECORD}
    if missing := sorted(sums.keys() - there):
        raise InvalidArgument(f"'{missing[0]}' is in {SUMS}, but not there")
    if more := sorted(there - sums.keys()):
        raise InvalidArgument(f"'{more[0]}' is not in {SUMS}")
    for name, wanted in sums.items():
        _check_sum(model / name, name, wanted)


def _check_sum(path: Path, name: str, wanted: str) -> None:
    with open(path, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wanted.lower():
        raise InvalidArgument(f"'{name}' has the SHA-256 {found}; it should have {wanted.lower()}")
