"""Reads a model at a URL through fsspec: lists its files, and downloads whole files. Keeps nothing.

    s3://bucket/models/digits          a folder, on any file system that lists: every file beneath it
    https://host/digits-7.tar.gz       an archive, on any file system

The libraries behind fsspec raise all kinds of exceptions. Here they become a ServingError: one sentence without the secrets of a
URL.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
#: Such exceptions will not go away when the same is asked again.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)
#: Nor will what these statuses of HTTP say: who asks may not read it. Hugging Face says so of repositories that it has not, too.
_REFUSED = (401, 403)
#: Errors of this host's disk.
_HERE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_T = TypeVar("_T")


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
        self.is_archive = self.shown.lower().endswith(ENDINGS)
        over_http = self.shown.partition(":")[0] in ("http", "https")
        if over_http and not self.is_archive:
            raise InvalidArgument(
                f"{self.shown}: nobody lists a folder over HTTP; it has to be an archive ({', '.join(ENDINGS)})"
            )
        try:
            self._files, self._path = url_to_fs(url, **(_http_options() if over_http else {}))
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"{self.shown}: {error}") from None
        #: How many files are downloaded at a time: as many as the file system's library can.
        self.at_a_time = 8 if self._files.async_impl else 1

    def files(self) -> tuple[File, ...]:
        """Lists the model's files at the source, sorted by name; for an archive, only the archive file.

        Raises NotFound: there is nothing; InvalidArgument: this is no model, or may not be read; Unavailable: it could not be
        read now.
        """
        if self.is_archive:
            return (_file("", self.shown.rpartition("/")[2], tried(lambda: self._call(self._files.info, self._path))),)
        found: dict[str, dict[str, Any]] = tried(
            lambda: self._call(self._files.find, self._path, withdirs=True, detail=True)
        )
        if not found:
            raise NotFound(f"{self.shown}: there is no such folder, or nothing is in it")
        if len(found) > MAX_ENTRIES:
            raise InvalidArgument(f"{self.shown}: it has {len(found)} files; a model has at most {MAX_ENTRIES}")
        root, files = self._path.rstrip("/"), []
        for path, info in found.items():
            name = path.rstrip("/").removeprefix(root).lstrip("/")
            # Object stores have empty objects whose names end with a slash, for folders.
            is_folder = info.get("type") == "directory" or path.endswith("/")
            if not name and not is_folder:
                raise InvalidArgument(f"{self.shown}: it is a file, and no archive ({', '.join(ENDINGS)})")
            if name and name != RECORD and not is_left_out(name.split("/")):
                if not is_folder and info.get("type") != "file":
                    raise InvalidArgument(f"{self.shown}: '{name}' is neither a file nor a folder")
                files.append(File(path, f"{name}/", 0, "folder") if is_folder else _file(path, name, info))
        return tuple(sorted(files, key=lambda file: file.name))

    def download(self, files: Sequence[File], places: Sequence[Path], max_byte_size: int) -> None:
        """Writes whole files to ``places``, whose folder exists. ``max_byte_size``: of an archive whose size nobody says.

        Raises ServingError: a file could not be read, or has another size than was listed; OSError: one cannot be written.
        """
        paths, to = [file.path or self._path for file in files], [str(place) for place in places]
        if self.is_archive and self._files.async_impl:
            self._call(self._files.get_file, paths[0], to[0], callback=_Bound(max_byte_size))
        else:
            self._call(self._files.get, paths, to)
        for file, place in zip(files, places, strict=True):
            if file.byte_size not in (-1, place.stat().st_size):
                raise Unavailable(
                    f"{self.shown}: '{file.name}' has {file.byte_size} bytes, {place.stat().st_size} came"
                )

    def _call(self, ask: Callable[..., _T], *arguments: object, **named: object) -> _T:
        """Calls the file system's library, whose exceptions become ServingErrors.

        They become Unavailable where another attempt may succeed; NotFound or InvalidArgument where it would not.
        """
        try:
            return ask(*arguments, **named)
        except ServingError as error:
            raise type(error)(f"{self.shown}: {error.message}") from None
        except FileNotFoundError as error:
            why = error.__cause__
            # fsspec says so of whatever an HTTP server answers, and of servers that are not there.
            if why is None or _status(why) == 404 or isinstance(why, FileNotFoundError):
                raise NotFound(f"{self.shown}: it is not there") from error
            kind = InvalidArgument if _status(why) in _REFUSED else Unavailable
            raise kind(f"{self.shown}: {_worded(why)}") from error
        except Exception as error:
            if getattr(error, "errno", None) in _HERE:
                raise
            final = isinstance(error, _FINAL) or _status(error) in _REFUSED
            raise (InvalidArgument if final else Unavailable)(f"{self.shown}: {_worded(error)}") from error


class _Bound(Callback):  # type: ignore[misc]
    """Ends a download that has brought too many bytes."""

    def __init__(self, max_byte_size: int) -> None:
        super().__init__()
        self._max_byte_size = max_byte_size

    def relative_update(self, inc: int = 1) -> None:
        """Counts bytes that came. Raises InvalidArgument: they are too many."""
        self.value += inc
        if self.value > self._max_byte_size:
            raise InvalidArgument(f"it has more than {self._max_byte_size} bytes (--max-byte-size)")


def tried(ask: Callable[[], _T]) -> _T:
    """Calls ``ask`` and returns its result; calls it again after a pause when it raises Unavailable, a few times."""
    for pause in PAUSES:
        try:
            return ask()
        except Unavailable:
            time.sleep(pause)
    return ask()


def _http_options() -> dict[str, Any]:
    """Returns fsspec's options for HTTP: URLs and archives as they are, the environment's proxies, no limit for a whole file."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=60.0)
    session = {"timeout": timeout, "trust_env": True, "auto_decompress": False, "requote_redirect_url": False}
    return {"encoded": True, "headers": {"Accept-Encoding": "identity"}, "client_kwargs": session}


def _file(path: str, name: str, info: Mapping[str, Any]) -> File:
    byte_size = info.get("size")
    identity = next((f"{key}={info[key]}" for key in _IDENTITIES if info.get(key)), "")
    return File(path, name, -1 if byte_size is None else int(byte_size), identity)


def _status(error: BaseException) -> int:
    """Returns the HTTP status that an exception carries; 0: it carries none."""
    status = getattr(error, "status", 0) or getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0


def _worded(error: BaseException) -> str:
    """Returns an exception's message in one line, without the query strings of URLs, which may be secrets."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer came in time"
    status, message = getattr(error, "status", None), getattr(error, "message", None)
    text = f"{status} {message}" if status and message else str(error)
    return re.sub(r"\?\S*", "", " ".join(text.split())) or type(error).__name__
