"""The stage: a model that is being fetched into a repository, in a folder next to it that scans of the repository ignore.

    REPOSITORY/.NAME.fetch/
        lock          locked by the process that fetches
        plan.json     where it comes from, with the size and identity of each file; without it nothing here counts
        archive       as it came
        part.*/       files that are coming
        NAME/         the model: files that are here whole
    REPOSITORY/NAME/  what daemons serve: exchanged with the staged model by one rename, when that is complete and checked

A fetch that is killed leaves the stage. The next fetch keeps each file that is here and has not changed at its source.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gzip
import hashlib
import os
import re
import shutil
import tempfile
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec

from tensord.daemon.fetching import archive
from tensord.daemon.fetching.source import RECORD, File, Source, tried
from tensord.daemon.models.repository import NAME
from tensord.shm.errors import InvalidArgument, Unavailable

#: A list of checksums in a model's folder, as ``sha256sum`` writes it.
SUMS = "SHA256SUMS"
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
        self.path = self.folder.with_name(f".{self.folder.name}.fetch")
        #: The staged model; it has the name of the one that is served.
        self.model = self.path / self.folder.name
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed the folder that it lies in.
            if os.stat(self.path / "lock").st_ino != os.fstat(self._lock).st_ino:
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

    def fill(self, source: Source, plan: Plan, max_byte_size: int) -> None:
        """Downloads what is missing of the plan's files, a few at a time.

        Raises InvalidArgument: the model is too large; Unavailable: a file could not be read, or has changed meanwhile; OSError:
        a file cannot be written.
        """
        before = _read(self.path / "plan.json")
        known = set() if before is None or before.url != plan.url else {file for file in before.files if file.identity}
        there = {file for file in plan.files if file in known and self._place(plan, file).is_file()}
        self._discard({self._place(plan, file) for file in there})
        missing = [file for file in plan.files if file not in there and not file.name.endswith("/")]
        whole, to_come = (sum(max(0, file.byte_size) for file in files) for files in (plan.files, missing))
        if whole > max_byte_size:
            raise InvalidArgument(f"the model has {whole} bytes; --max-byte-size is {max_byte_size}")
        free = shutil.disk_usage(self.path).free
        if to_come > free:
            raise InvalidArgument(f"{to_come} bytes are to come; '{self.folder.parent}' has room for {free}")
        _write(self.path / "plan.json", plan)
        for file in plan.files:
            if file.name.endswith("/"):
                (self.model / file.name).mkdir(parents=True, exist_ok=True)
        for at in range(0, len(missing), source.at_a_time):
            files = missing[at : at + source.at_a_time]
            tried(partial(self._bring, source, plan, files, max_byte_size))
        if [replace(file, byte_size=0) for file in source.files()] != [
            replace(file, byte_size=0) for file in plan.files
        ]:
            raise Unavailable(f"{source.shown}: it has changed while it was fetched; fetch it again")

    def _place(self, plan: Plan, file: File) -> Path:
        return self.path / "archive" if plan.archive else self.model / file.name

    def _bring(self, source: Source, plan: Plan, files: list[File], max_byte_size: int) -> None:
        """Downloads files to a new folder, where no earlier attempt still writes, and moves them to their places."""
        with tempfile.TemporaryDirectory(prefix="part.", dir=self.path) as parts:
            places = [Path(parts, str(index)) for index in range(len(files))]
            source.download(files, places, max_byte_size)
            for file, part in zip(files, places, strict=True):
                with open(part, "rb") as opened:
                    os.fsync(opened.fileno())
                self._place(plan, file).parent.mkdir(parents=True, exist_ok=True)
                part.rename(self._place(plan, file))

    def complete(self, source: Source, plan: Plan, sha256: str, max_byte_size: int) -> None:
        """Turns the fetched files into the staged model: verifies checksums, and unpacks an archive.

        ``sha256``: the expected checksum of the archive, or of the folder's list of checksums; "": none is expected.

        Raises InvalidArgument: a checksum is wrong, or the archive is damaged; the fetched files are removed then. OSError: a
        file cannot be written.
        """
        try:
            if source.is_archive:
                name, fetched = plan.files[0].name, self.path / "archive"
                _decode(fetched, name, max_byte_size)
                if sha256:
                    _check_sum(fetched, name, sha256)
                archive.unpack(fetched, name, self.model, max_byte_size)
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
        # What will lie here was not fetched by this plan.
        (self.path / "plan.json").unlink(missing_ok=True)
        if not os.path.lexists(self.folder):
            self.model.rename(self.folder)
        elif not _exchanged(self.model, self.folder):
            aside = self.path / "former"
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
        shutil.rmtree(self.path, ignore_errors=True)

    def _discard(self, kept: set[Path]) -> None:
        """Removes all from the stage but the lock and the files in ``kept``; an empty folder that stayed would be a version."""
        for parent, folders, names in os.walk(self.path, topdown=False):
            for path in (Path(parent, name) for name in (*names, *folders)):
                if path.is_symlink() or not path.is_dir():
                    if path not in kept and path != self.path / "lock":
                        path.unlink()
                elif not any(path.iterdir()):
                    path.rmdir()


def _decode(fetched: Path, name: str, max_byte_size: int) -> None:
    """Takes off the gzip coding in which a server sent an archive that is not published so."""
    with open(fetched, "rb") as file:
        if file.read(2) != b"\x1f\x8b" or name.lower().endswith((".gz", ".tgz")):
            return
    plain = fetched.with_name("archive.plain")
    left = max_byte_size
    try:
        with gzip.open(fetched) as coded, open(plain, "wb") as file:
            while left >= 0 and (block := coded.read(1 << 20)):
                left -= file.write(block)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidArgument(f"'{name}' cannot be unpacked: {error}") from error
    if left < 0:
        raise InvalidArgument(f"'{name}' has more than {max_byte_size} bytes (--max-byte-size)")
    plain.rename(fetched)


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
