"""Fetches a model into a repository (``tensord fetch``): downloads it to a hidden folder, checks it, and moves it into place.

    REPOSITORY/.NAME.fetch/   the hidden folder, which daemons ignore
        lock                  locked by the process that fetches
        files/                complete files, each named after a digest of its path, size and identity at the source
        part.*/               incomplete files
        NAME/                 the new model
    REPOSITORY/NAME/          the model that daemons serve, which the new model replaces once it has been checked

If a fetch is killed, the hidden folder stays. The next fetch uses each complete file that has not changed at the source.
The source is a folder or an archive on any file system that fsspec knows. A folder's file system must be able to list files.

    s3://bucket/models/digits          a folder
    https://host/digits-7.tar.gz       an archive

If the source cannot be read, a ServingError is raised. Its message shows the URL without user name, password and query.
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
import stat
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from tensord.config.model_folder import MAX_ENTRIES, is_passed_over
from tensord.config.options import Options
from tensord.daemon import check, tables
from tensord.daemon.models import repository
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.processes.devices import Device
from tensord.shm.errors import InvalidArgument, NotFound, ServingError, Unavailable

try:
    import fsspec
    from fsspec.callbacks import Callback
    from fsspec.core import url_to_fs
except ImportError:
    fsspec, Callback = None, object

#: A list of checksums in a model's folder, as ``sha256sum`` writes it.
SUMS = "SHA256SUMS"
_SUM = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
#: The name of the file in a fetched model's folder that says where the model came from. The file is no part of the model.
RECORD = ".fetched.json"
#: Seconds before each further try of what failed.
PAUSES = (0.5, 2.0, 8.0)
#: Names under which file systems identify a file's content, or at least its last change; the most exact come first.
_IDENTITIES = (
    *("ETag", "etag", "md5Hash", "content_hash", "blob_id", "Content-MD5", "Digest", "generation"),
    *("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created"),
)
#: Errors that are the same when asked again, and those of this host's disk.
_FINAL = (PermissionError, IsADirectoryError, NotImplementedError)
_HERE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def fetch(
    url: str, folder: Path, options: Options, devices: Sequence[Device], sha256: str, max_byte_size: int, timeout: float
) -> str:
    """Downloads the model at ``url``, checks it, and stores its files in ``folder``. Returns a sentence that says what was done.

    Args:
      options: the daemon's configuration.
      devices: the devices of the daemon's workers, on which the check loads the model. If empty, no code of the model is run.
      sha256: the expected checksum of the archive at ``url``, or of SHA256SUMS if ``url`` is a folder. If "", none is expected.
      max_byte_size: the most bytes that the model, and an archive of it, may have.
      timeout: how many seconds the load of each version may take in the check.
    Raises ServingError if the model is not at ``url``, cannot be downloaded, is too large, or cannot be served.
    Raises OSError if the model cannot be written.
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
    return f"{folder.name}: version {versions} is in {folder}, {tables.scaled(whole)} from {source.shown}"


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yields a hidden folder beside ``folder`` in which the caller builds a new model, and which no other process uses.

    The hidden folder and its files are removed after the ``with`` block. If the block raises an error, they stay, so that a
    later fetch can use them. Raises InvalidArgument if another process is fetching the model.
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
    """Downloads the model at ``source`` into the folder ``model``, and verifies checksums.

    A complete file that an earlier fetch downloaded is used again if ``source`` shows that the file has not changed since.
    Args:
      files: what ``source.files()`` returned.
      sha256: the expected checksum of the archive, or of the file SHA256SUMS if ``source`` is a folder. "": none.
      max_byte_size: the most bytes that the model may have.
    Raises InvalidArgument if the model is damaged, is too large for the limit or the disk, or has a wrong checksum.
    Raises a ServingError if ``source`` cannot be read. Raises Unavailable if the model at ``source`` changes meanwhile.
    Raises OSError if a file cannot be written.
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
            unpack(places[files[0]], files[0].name, model, max_byte_size)
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
        shutil.rmtree(model, ignore_errors=True)  # an archive is not unpacked before its checksum fits
        raise


def swap(model: Path, folder: Path) -> None:
    """Renames the folder ``model`` to ``folder``. A folder that was at ``folder`` is moved to the parent of ``model``.

    If the file system cannot exchange two folders by one rename, ``folder`` does not exist for an instant.
    Raises OSError if a rename fails. Then ``folder`` is as it was before the call. If the finished rename cannot be flushed to
    disk, only prints a warning.
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
    try:
        descriptor = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # such as EINVAL of a file system that flushes no folders
        print(f"'{folder.parent}' cannot be flushed to disk: {error.strerror}", file=sys.stderr)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchanges two folders by one rename. Returns False if the operating system or the file system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None or not rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return rename is not None
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _check_sums(model: Path, sha256: str) -> None:
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
        verdicts = check.check(placed, options, devices, timeout)
        reason = next(verdict.reason for verdict in verdicts if verdict.model.name == found.name)
    if reason:
        raise InvalidArgument(
            f"model '{found.name}' as it was fetched cannot be served, and stays in {model}: {' '.join(reason.split())}"
        )
    return found


@dataclass(frozen=True, slots=True)
class File:
    """A file, folder or archive at the URL from which a model is downloaded. The ``name`` of a folder ends with a slash."""

    #: Its path as its file system names it; "" of an archive, whose URL may hold a signature.
    path: str
    #: Its path in the model's folder, or the name of an archive.
    name: str
    #: -1: nobody says.
    byte_size: int
    #: Changes when its content does; "": nobody says whether it has changed.
    identity: str


class Source:
    """The place from which a model is fetched: a folder or an archive, on any file system that fsspec knows."""

    def __init__(self, url: str) -> None:
        """Chooses fsspec's file system for ``url``. Sends no request. Raises InvalidArgument if the URL cannot be used."""
        if fsspec is None:
            raise InvalidArgument("fetching needs fsspec: pip install 'tensord[fetch]'")
        #: The URL as it may be shown: without a user's name, password and query, where signatures stand.
        self.shown = re.sub(r"(?<=://)[^/@]*@", "", url.partition("?")[0]).rstrip("/")
        if "::" in url:
            raise InvalidArgument(f"'{self.shown}' is a chain of URLs: tensord fetch takes one")
        self.is_archive, options = self.shown.lower().endswith(ENDINGS), {}
        if self.shown.startswith(("http:", "https:")):
            if not self.is_archive:
                kinds = ", ".join(ENDINGS)
                raise InvalidArgument(
                    f"{self.shown}: nobody lists a folder over HTTP; it has to be an archive ({kinds})"
                )
            import aiohttp

            session = {
                "timeout": aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=60.0),
                "trust_env": True,  # its proxies
                "requote_redirect_url": False,
                # A server's Content-Encoding is undone, unless it may be what the archive is compressed with.
                "auto_decompress": not self.shown.lower().endswith(("gz", "bz2", "xz")),
            }
            options = {"encoded": True, "headers": {"Accept-Encoding": "identity"}, "client_kwargs": session}
        try:
            self._files, self._path = url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"{self.shown}: {error}") from None
        #: How many files may be downloaded at a time: as many as the file system's library can.
        self.at_a_time = 8 if self._files.async_impl else 1

    def files(self) -> tuple[File, ...]:
        """Lists the model's files at the source, sorted by name. If the source is an archive, only the archive is listed.

        Raises NotFound if nothing is at the source. Raises InvalidArgument if the source is no model, or refuses access.
        Raises Unavailable if the source cannot be read now.
        """
        if self.is_archive:
            return (_file("", self.shown.rpartition("/")[2], self._ask(self._files.info, self._path)),)
        found = self._ask(self._files.find, self._path, withdirs=True, detail=True)
        if len(found) > MAX_ENTRIES:
            raise InvalidArgument(f"{self.shown}: it has {len(found)} files; a model has at most {MAX_ENTRIES}")
        root, files = self._path.rstrip("/"), []
        for path, info in found.items():
            name = path.rstrip("/").removeprefix(root).lstrip("/")
            # Object stores have empty objects whose names end with a slash, for folders.
            kind = "directory" if path.endswith("/") else info.get("type")
            if not name and kind != "directory":
                raise InvalidArgument(f"{self.shown}: it is a file, and no archive ({', '.join(ENDINGS)})")
            if name and name != RECORD and not is_left_out(name.split("/")):
                if kind not in ("directory", "file"):
                    raise InvalidArgument(f"{self.shown}: '{name}' is neither a file nor a folder")
                files.append(_file(path, name, info) if kind == "file" else File(path, f"{name}/", 0, "folder"))
        if not files:
            raise NotFound(f"{self.shown}: there is no such folder, or no file of a model is in it")
        return tuple(sorted(files, key=lambda file: file.name))

    def download(self, files: Sequence[File], places: Sequence[Path], stage: Path, max_byte_size: int) -> None:
        """Downloads each file in ``files`` to the path at the same index of ``places``. Only complete files are put there.

        ``stage``: a folder for incomplete files, on the same file system as ``places``.
        ``max_byte_size``: the most bytes of the archive if the source is an archive. Unused if the source is a folder.
        Raises ServingError if a file cannot be read, has another size than its known ``byte_size``, or is too large.
        Raises OSError if the disk is full, is read-only or fails.
        """

        def bring() -> None:
            # In a new folder of the stage, where no earlier attempt still writes.
            with tempfile.TemporaryDirectory(prefix="part.", dir=stage) as folder:
                parts = [os.path.join(folder, str(index)) for index in range(len(files))]
                if self.is_archive:
                    self._files.get_file(self._path, parts[0], callback=_Coming(files[0], max_byte_size))
                else:
                    self._files.get([file.path for file in files], parts)
                for file, part, place in zip(files, parts, places, strict=True):
                    if file.byte_size not in (-1, came := os.stat(part).st_size):
                        raise Unavailable(f"'{file.name}' has {file.byte_size} bytes, {came} came")
                    with open(part, "rb") as opened:
                        os.fsync(opened.fileno())
                    os.rename(part, place)

        self._ask(bring)

    def _ask(self, ask: Callable[..., Any], *arguments: object, **named: object) -> Any:
        """Calls ``ask``, a function that uses fsspec, and returns its result. Retries after temporary errors."""
        pauses = list(PAUSES)
        while True:
            try:
                return ask(*arguments, **named)
            except Exception as error:
                if getattr(error, "errno", None) in _HERE:
                    raise
                refusal = self._refusal(error)
                if not (pauses and isinstance(refusal, Unavailable)):
                    raise refusal from error
            time.sleep(pauses.pop(0))

    def _refusal(self, error: Exception) -> ServingError:
        if isinstance(error, ServingError):
            return type(error)(f"{self.shown}: {error.message}")
        # fsspec says that a file is not found of whatever an HTTP server answers, and of servers that are not there.
        why = (isinstance(error, FileNotFoundError) and error.__cause__) or error
        status, message = getattr(why, "status", 0), getattr(why, "message", "")
        code = status or getattr(getattr(why, "response", None), "status_code", 0)
        if isinstance(why, FileNotFoundError) or (why is not error and code == 404):
            return NotFound(f"{self.shown}: it is not there")
        # Without the queries of URLs, which may be secrets.
        said = re.sub(r"\?\S*", "", " ".join((f"{status} {message}" if message else str(why)).split()))
        # Hugging Face refuses whoever asks for a repository that it has not.
        final = code in (401, 403) or isinstance(why, _FINAL)
        return (InvalidArgument if final else Unavailable)(f"{self.shown}: {said or type(why).__name__}")


class _Coming(Callback):  # type: ignore[misc]
    """Prints the progress of an archive's download. Raises InvalidArgument if it has more bytes than the user allowed."""

    def __init__(self, file: File, max_byte_size: int) -> None:
        super().__init__()
        self._file, self._max_byte_size, self._said = file, max_byte_size, time.monotonic()

    def relative_update(self, inc: int = 1) -> None:
        self.value += inc
        if self.value > self._max_byte_size:
            raise InvalidArgument(f"it has more than {self._max_byte_size} bytes (--max-byte-size)")
        if time.monotonic() - self._said > 10:
            self._said = time.monotonic()
            of = f" of {self._file.byte_size >> 20}" if self._file.byte_size >= 0 else ""
            print(f"{self._file.name}: {self.value >> 20}{of} MiB", file=sys.stderr)


def _file(path: str, name: str, info: Mapping[str, Any]) -> File:
    identity = next((f"{key}={info[key]}" for key in _IDENTITIES if info.get(key)), "")
    return File(path, name, -1 if info.get("size") is None else int(info["size"]), identity)


def unpack(archive: Path, name: str, folder: Path, max_byte_size: int) -> None:
    """Unpacks an archive into ``folder``, which must not exist yet.

    ``name``: the name of the archive, which ends with its format. ``max_byte_size``: how many bytes all files may have together.
    If the archive contains a single folder, the files of that folder go directly into ``folder``, unless the single folder is
    named like a model version, such as "1". Raises InvalidArgument if the archive is damaged, too large, or has members that are
    not allowed. Raises OSError if a file cannot be written.
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
    """Returns whether a fetch skips a file because no model needs such files, for example files in ``__pycache__``.

    ``parts``: the file's path, split at slashes. Raises InvalidArgument if the path could lead out of the model's folder.
    """
    if any(part in ("..", "") or "\\" in part or "\0" in part for part in parts) and parts != [""]:
        raise InvalidArgument(f"'{'/'.join(parts)}' is no path in a model's folder")
    return any(map(is_passed_over, parts))
