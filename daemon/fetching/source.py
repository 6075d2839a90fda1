"""Reads a model at a URL through fsspec: lists its files, and downloads whole files. Keeps nothing.

    s3://bucket/models/digits          a folder, on any file system that lists: every file beneath it
    https://host/digits-7.tar.gz       an archive, on any file system

The libraries behind fsspec raise all kinds of exceptions; here they become a ServingError, without the secrets of a URL.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensord.config.model_folder import MAX_ENTRIES
from tensord.daemon.fetching.archive import ENDINGS, is_left_out
from tensord.shm.errors import InvalidArgument, NotFound, ServingError, Unavailable

try:
    import fsspec
    from fsspec.callbacks import Callback
    from fsspec.core import url_to_fs
except ImportError:
    fsspec, Callback = None, object

#: In the folder of a model that was fetched: what it was fetched from. It is no part of the model.
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


@dataclass(frozen=True, slots=True)
class File:
    """A file or folder of the model at its source. A folder's name ends with a slash; an empty one may be a version."""

    #: Its path as its file system names it; "" of an archive, whose URL may hold a signature.
    path: str
    #: Its path in the model's folder, or the name of an archive.
    name: str
    #: -1: nobody says.
    byte_size: int
    #: Changes when its content does; "": nobody says whether it has changed.
    identity: str


class Source:
    """A folder or an archive with a model, on any file system that fsspec knows."""

    def __init__(self, url: str) -> None:
        """Chooses the file system for the URL, and sends no request yet. Raises InvalidArgument: the URL cannot be used."""
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
        """Lists the model's files at the source, sorted by name; for an archive, only the archive file.

        Raises NotFound: there is nothing; InvalidArgument: it is no model, or may not be read; Unavailable: it could not be read
        now.
        """
        if self.is_archive:
            return (_file("", self.shown.rpartition("/")[2], self._ask(self._files.info, self._path)),)
        found = self._ask(self._files.find, self._path, withdirs=True, detail=True)
        if not found:
            raise NotFound(f"{self.shown}: there is no such folder, or nothing is in it")
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
        return tuple(sorted(files, key=lambda file: file.name))

    def download(self, files: Sequence[File], places: Sequence[Path], stage: Path, max_byte_size: int) -> None:
        """Brings whole files to ``places``. ``max_byte_size``: of an archive whose size nobody says.

        Raises ServingError: a file could not be read, or has another size than was listed; OSError: one cannot be written.
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
        """Calls the file system's library, again after a pause where another attempt may succeed. Raises ServingError."""
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
    """Counts the bytes of an archive that come: ends those that are too many, and says every ten seconds how many there are."""

    def __init__(self, file: File, max_byte_size: int) -> None:
        super().__init__()
        self._file, self._max_byte_size, self._said = file, max_byte_size, time.monotonic()

    def relative_update(self, inc: int = 1) -> None:
        self.value += inc
        if self.value > self._max_byte_size:
            raise InvalidArgument(f"it has more than {self._max_byte_size} bytes (--max-byte-size)")
        if time.monotonic() - self._said > 10:
            self._said = time.monotonic()
            print(f"{self._file.name}: {self.value >> 20} of {self._file.byte_size >> 20} MiB", file=sys.stderr)


def _file(path: str, name: str, info: Mapping[str, Any]) -> File:
    identity = next((f"{key}={info[key]}" for key in _IDENTITIES if info.get(key)), "")
    return File(path, name, -1 if info.get("size") is None else int(info["size"]), identity)
