"""Fetches a model into a repository (``tensord fetch``): downloads it next to its folder, checks it, and swaps it in.

    REPOSITORY/.NAME.fetch/   the stage, which scans of the repository ignore
        lock                  locked by the process that fetches
        files/                what is here whole, each under a digest of its path, size and identity at its source
        part.*/               what is coming
        NAME/                 the model
    REPOSITORY/NAME/          what daemons serve: exchanged with the staged model by one rename, when that is complete and checked

A fetch that is killed leaves the stage. The next fetch keeps each file that is here and has not changed at its source.
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
from pathlib import Path

import msgspec

from tensord.config.options import Options
from tensord.daemon import check, tables
from tensord.daemon.fetching import archive
from tensord.daemon.fetching.source import RECORD, File, Source
from tensord.daemon.models import repository
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.processes.devices import Device
from tensord.daemon.progress_bar import ProgressBar
from tensord.shm.errors import InvalidArgument, Unavailable

#: A list of checksums in a model's folder, as ``sha256sum`` writes it.
SUMS = "SHA256SUMS"
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


def fetch(
    url: str, folder: Path, options: Options, devices: Sequence[Device], sha256: str, max_byte_size: int, timeout: float
) -> str:
    """Fetches the model at ``url`` into ``folder``. Returns a sentence that says what was done. Progress goes to stderr.

    Args:
      devices: the devices of the workers, one of which loads the model to check it; empty: only its configuration and folders are
        read, and none of its code is run.
      sha256: the expected checksum of the archive, or of the folder's SHA256SUMS; "": unknown.
      max_byte_size: the most bytes of the model, and of its archive.
      timeout: seconds to load each version of the model for the check.

    Raises: ServingError: the model is not at ``url``, cannot be downloaded, is too large, or cannot be served; OSError: the model
      cannot be written.
    """
    folder, source = folder.absolute(), Source(url)
    if not repository.NAME.fullmatch(folder.name):
        raise InvalidArgument(
            f"'{folder.name}' cannot be a model's name: letters, digits and _.,+- of which . + and - do not begin it"
        )
    files = source.files()
    record = msgspec.json.encode({"url": source.shown, "archive": source.is_archive, "files": files})
    with staged(folder) as stage:
        # Without a tag or a hash nobody knows whether a file has changed.
        if (
            all(file.identity for file in files)
            and (folder / RECORD).exists()
            and (folder / RECORD).read_bytes() == record
        ):
            return f"{folder.name}: it is as at {source.shown} already"
        fill(stage / folder.name, source, files, sha256, max_byte_size)
        (stage / folder.name / RECORD).write_bytes(record)
        found = _verified(stage / folder.name, folder.parent, options, devices, timeout)
        swap(stage / folder.name, folder)
    whole = sum(max(0, file.byte_size) for file in files)
    versions = ", ".join(map(str, found.chosen))
    return f"{folder.name}: version {versions} is in {folder}, {tables.scaled(whole, 1024, 'B')} from {source.shown}"


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Makes the stage of a model's folder for this process alone, and removes it when a block has run without an error.

    Raises InvalidArgument: another process is fetching the model.
    """
    stage = folder.with_name(f".{folder.name}.fetch")
    stage.mkdir(parents=True, exist_ok=True)
    with open(stage / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed the folder that it lies in.
            if not os.path.samestat(os.stat(stage / "lock"), os.fstat(lock.fileno())):
                raise FileNotFoundError
        except OSError:
            raise InvalidArgument(f"model '{folder.name}' is being fetched by another process") from None
        yield stage
        shutil.rmtree(stage, ignore_errors=True)


def fill(model: Path, source: Source, files: Sequence[File], sha256: str, max_byte_size: int) -> None:
    """Downloads those files that are not in the stage yet, verifies checksums, and makes the staged model of them.

    Raises InvalidArgument: the model is too large or damaged, or a checksum is wrong; Unavailable: a file could not be read, or
    has changed meanwhile; OSError: a file cannot be written.
    """
    whole = model.with_name("files")
    whole.mkdir(exist_ok=True)
    places = {
        file: whole / hashlib.sha256(f"{source.shown}\n{file!r}".encode()).hexdigest()
        for file in files
        if not file.name.endswith("/")
    }
    # What a fetch that was killed has left, and what is at the source no more.
    for left in whole.parent.glob("part.*"):
        shutil.rmtree(left)
    for left in set(whole.iterdir()) - set(places.values()):
        left.unlink()
    missing = [file for file, place in places.items() if not (file.identity and place.exists())]
    byte_size, to_come = (sum(max(0, file.byte_size) for file in each) for each in (files, missing))
    if byte_size > max_byte_size:
        raise InvalidArgument(f"the model has {byte_size} bytes; --max-byte-size is {max_byte_size}")
    if to_come > (free := shutil.disk_usage(whole).free):
        raise InvalidArgument(f"{to_come} bytes are to come; '{model.parent.parent}' has room for {free}")

    for at in range(0, len(missing), source.at_a_time):
        some = missing[at : at + source.at_a_time]
        source.download(some, [places[file] for file in some], whole.parent, max_byte_size)
    if [(file.name, file.identity) for file in source.files()] != [(file.name, file.identity) for file in files]:
        raise Unavailable(f"{source.shown}: it has changed while it was fetched; fetch it again")
    shutil.rmtree(model, ignore_errors=True)
    try:
        if source.is_archive:
            _check_sum(places[files[0]], files[0].name, sha256)
            archive.unpack(places[files[0]], files[0].name, model, max_byte_size)
        for file in () if source.is_archive else files:
            place = model / file.name
            (place if file.name.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
            if file in places:
                try:
                    os.link(places[file], place)
                except OSError:  # of a file system that has no links
                    places[file].rename(place)
        _check_sums(model, "" if source.is_archive else sha256)
    except InvalidArgument:
        shutil.rmtree(whole)  # what is wrong is not gone on with
        shutil.rmtree(model)
        raise


def swap(model: Path, folder: Path) -> None:
    """Replaces the served model in ``folder`` by the staged one, by one rename.

    On a file system that cannot exchange two folders it takes two renames: for an instant no folder has the name, which a
    daemon that polls ignores. Raises OSError: a rename failed; the former model is still served.
    """
    if not os.path.lexists(folder):
        model.rename(folder)
    elif not _exchanged(model, folder):
        aside = folder.rename(model.with_name("former"))
        try:
            model.rename(folder)
        except BaseException:
            aside.rename(folder)
            raise
    descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchanges two folders by one rename. Returns False if the file system or the C library cannot.

    Raises OSError: the rename failed.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or not rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return rename is not None
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _check_sums(model: Path, sha256: str) -> None:
    """Checks a model's files against its list of checksums, if it has one: the files must be exactly those listed.

    ``sha256``: the expected checksum of the list itself; "": not checked.

    Raises InvalidArgument: a checksum is wrong, or the list or a file is missing, unexpected or malformed.
    """
    if not (model / SUMS).is_file():
        if sha256:
            raise InvalidArgument(f"--sha256 of a folder is that of its {SUMS}, which it does not have")
        return
    _check_sum(model / SUMS, SUMS, sha256)
    sums: dict[str, str] = {}
    for number, line in enumerate((model / SUMS).read_text(errors="surrogateescape").splitlines(), 1):
        if not (found := _SUM.fullmatch(line)):
            raise InvalidArgument(f"{SUMS}: line {number} is no checksum and name")
        sums[os.path.normpath(found[2])] = found[1]
    there = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()} - {SUMS, RECORD}
    for names, where in ((sums.keys() - there, f"in {SUMS}, but not there"), (there - sums.keys(), f"not in {SUMS}")):
        if names:
            raise InvalidArgument(f"'{min(names)}' is {where}")
    for name, wanted in sums.items():
        _check_sum(model / name, name, wanted)


def _check_sum(path: Path, name: str, wanted: str) -> None:
    with open(path, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest() if wanted else ""
    if found != wanted.lower():
        raise InvalidArgument(f"'{name}' has the SHA-256 {found}; it should have {wanted.lower()}")


def _verified(model: Path, beside: Path, options: Options, devices: Sequence[Device], timeout: float) -> FoundModel:
    """Checks a fetched model as ``tensord check`` does, an ensemble together with its members. Returns the model as it was found.

    ``beside``: the repository that it will belong to; members are looked for there and in the configured repositories. Raises
    InvalidArgument: the model cannot be served; its folder stays.
    """
    found = repository.poll(model)
    repositories = list(dict.fromkeys([beside, *(Path(path).absolute() for path in options.repository.paths)]))
    models, waiting = {found.name: found}, list(found.members)
    while waiting:
        name, _ = waiting.pop()
        if name not in models:
            models[name] = repository.find(repositories, name)
            waiting += models[name].members
    reason = found.problem
    if devices and not reason:
        placed = check.placed(models.values(), devices, options)
        verdicts = check.check(placed, options, devices, timeout, ProgressBar())
        reason = next(verdict.reason for verdict in verdicts if verdict.model.name == found.name)
    if reason:
        raise InvalidArgument(
            f"model '{found.name}' as it was fetched cannot be served, and stays in {model}: {' '.join(reason.split())}"
        )
    return found
