"""Reads a model from a URL through fsspec: lists its files, and reads their bytes in blocks. Writes nothing.

    s3://bucket/models/digits          a folder, on any file system that lists: every file beneath it
    https://host/digits-7.tar.gz       an archive, on any file system

The libraries behind fsspec raise all kinds of exceptions. Here they become a ServingError: one sentence without the secrets of a
URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tensord.daemon.models.repository import MAX_ENTRIES
from tensord.shm.errors import InvalidArgument, NotFound, ServingError, Unavailable

try:
    import fsspec
    from fsspec.core import url_to_fs
except ImportError:
    fsspec = None

#: In the folder of a model that was fetched: what it was fetched from. It is no part of the model.
RECORD = ".fetched.json"
#: Bytes of one request for a part of a file, and how many are under way at a time: together what is held in memory.
BLOCK_BYTE_SIZE = 8 << 20
BLOCKS_AT_A_TIME = 8
#: Seconds before each further try of a block that did not come.
PAUSES = (0.5, 2.0, 8.0)
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
#: Names under which file systems identify a file's content, or at least its last change; the most exact come first.
_IDENTITIES = (
    *("ETag", "etag", "md5Hash", "content_hash", "blob_id", "Content-MD5", "Digest", "generation"),
    *("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "created"),
)
#: Seconds that HTTP waits to connect, and for the next bytes.
_CONNECT_SECONDS, _READ_SECONDS = 30.0, 60.0
#: Such exceptions will not go away when the same is asked again.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)
#: Nor will what these statuses of HTTP say: who asks may not read it. Hugging Face says so of repositories that it has not, too.
_REFUSED = (401, 403)
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
        self.is_archive = self.shown.lower().endswith(ARCHIVES)
        self._over_http = self.shown.partition(":")[0] in ("http", "https")
        if self._over_http and not self.is_archive:
            raise InvalidArgument(
                f"{self.shown}: nobody lists a folder over HTTP; it has to be an archive ({', '.join(ARCHIVES)})"
            )
        try:
            self._files, self._path = url_to_fs(url, **(_http_options() if self._over_http else {}))
        except (ImportError, ValueError) as error:
            raise InvalidArgument(f"{self.shown}: {error}") from None

    def files(self) -> tuple[File, ...]:
        """Lists the model's files at the source, sorted by name; for an archive, only the archive file.

        Raises NotFound: there is nothing; InvalidArgument: this is no model, or may not be read; Unavailable: it could not be
        read now.
        """
        if self.is_archive:
            info = self._tried(lambda: self._files.info(self._path))
            return (_file("", self.shown.rpartition("/")[2], info),)
        found: Mapping[str, Mapping[str, Any]] = self._tried(
            lambda: self._files.find(self._path, withdirs=True, detail=True)
        )
        if not found:
            raise NotFound(f"{self.shown}: there is no such folder, or nothing is in it")
        if len(found) > MAX_ENTRIES:
            raise InvalidArgument(f"{self.shown}: it has {len(found)} files; a model has at most {MAX_ENTRIES}")
        root, files = self._path.rstrip("/"), []
        for path, info in found.items():
            name = path.rstrip("/").removeprefix(root).lstrip("/")
            # Object stores have empty objects whose names end with a slash, for folders.
            if info.get("type") == "directory" or path.endswith("/"):
                if name:
                    files.append(File(path, f"{name}/", 0, "folder"))
            elif not name:
                raise InvalidArgument(f"{self.shown}: it is a file, and no archive ({', '.join(ARCHIVES)})")
            elif name != RECORD:
                files.append(_file(path, name, info))
        for file in files:
            if not is_inside(file.name.removesuffix("/")):
                raise InvalidArgument(f"{self.shown}: '{file.name}' is no path in a model's folder")
        return tuple(sorted(files, key=lambda file: file.name))

    def blocks(self, wanted: Sequence[tuple[File, int]]) -> Iterator[tuple[File, int, bytes]]:
        """Yields the bytes of files in order, in blocks: (file, offset, bytes). ``wanted``: files, with the offset to begin at.

        A few blocks are read at a time. A file of unknown size, or on a server that sends no parts of files, is read from its
        beginning, whatever offset was wanted.

        Raises ServingError: a block could not be read, even after several attempts.
        """
        waiting: deque[tuple[File, int, Future[bytes | None]]] = deque()
        with contextlib.ExitStack() as stack:
            threads = ThreadPoolExecutor(BLOCKS_AT_A_TIME, "fetch")
            stack.callback(threads.shutdown, cancel_futures=True)
            whole: set[str] = set()
            for file, begin, byte_size in _parts(wanted):
                if byte_size >= 0:
                    waiting.append((file, begin, threads.submit(self._block, file, begin, byte_size)))
                while waiting and (byte_size < 0 or len(waiting) >= BLOCKS_AT_A_TIME):
                    yield from self._arrived(*waiting.popleft(), whole)
                if byte_size < 0:
                    yield from self._stream(file)
            while waiting:
                yield from self._arrived(*waiting.popleft(), whole)

    def _arrived(
        self, file: File, begin: int, block: Future[bytes | None], whole: set[str]
    ) -> Iterator[tuple[File, int, bytes]]:
        """Waits for a block that is being read and yields it; if the server sends no parts of files, yields the whole file once.

        Args:
          begin: the block's offset in the file.
          block: the block's bytes; None: the server sends no parts.
          whole: the names of the files that were yielded as a whole so far.
        """
        content = block.result()
        if content is not None and file.name not in whole:
            yield file, begin, content
        elif file.name not in whole:
            whole.add(file.name)
            yield from self._stream(file)

    def _block(self, file: File, begin: int, byte_size: int) -> bytes | None:
        """Reads a part of a file; None: the server sends no parts of files. Raises ServingError: the part could not be read."""

        def read() -> bytes | None:
            content = self._part(file, begin, begin + byte_size)
            if content is not None and len(content) != byte_size:
                raise OSError(f"'{file.name}': {byte_size} bytes from {begin} on were asked for, {len(content)} came")
            return content

        return self._tried(read)

    def _tried(self, ask: Callable[[], _T]) -> _T:
        """Calls ``ask`` and returns its result; calls it again after a pause when it raises Unavailable, a few times.

        Raises ServingError: the last call failed, or an earlier one in a way that will not change.
        """
        for pause in PAUSES:
            try:
                with self._errors():
                    return ask()
            except Unavailable:
                time.sleep(pause)
        with self._errors():
            return ask()

    def _part(self, file: File, begin: int, end: int) -> bytes | None:
        if begin == end:
            return b""
        if not self._over_http:
            # What is no request but an opened file (Hugging Face's) would read megabytes ahead for each part.
            ahead = {} if self._files.async_impl else {"cache_type": "none"}
            return bytes(self._files.cat_file(file.path or self._path, start=begin, end=end, **ahead))
        # ``cat_file`` there would take whatever comes for the part.
        with self._files.open(file.path or self._path, size=file.byte_size, cache_type="none") as opened:
            if not opened.seekable():
                return None
            opened.seek(begin)
            try:
                return bytes(opened.read(end - begin))
            except ValueError:
                return None

    def _stream(self, file: File) -> Iterator[tuple[File, int, bytes]]:
        begin = 0
        with self._errors():
            opened = self._files.open(file.path or self._path, block_size=0)
        with opened:
            while True:
                with self._errors():
                    content = opened.read(BLOCK_BYTE_SIZE)
                if not content:
                    break
                yield file, begin, content
                begin += len(content)
        if 0 <= file.byte_size != begin:
            raise Unavailable(f"{self.shown}: '{file.name}' has {file.byte_size} bytes, {begin} came")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns exceptions of the file system's library into ServingError, within a ``with`` block.

        They become Unavailable where another attempt may succeed; NotFound or InvalidArgument where it would not.
        """
        try:
            yield
        except ServingError:
            raise
        except FileNotFoundError as error:
            why = error.__cause__
            # fsspec says so of whatever an HTTP server answers, and of servers that are not there.
            if why is None or _status(why) == 404 or isinstance(why, FileNotFoundError):
                raise NotFound(f"{self.shown}: it is not there") from error
            if _status(why) in _REFUSED:
                raise InvalidArgument(f"{self.shown}: {_worded(why)}") from error
            raise Unavailable(f"{self.shown}: {_worded(why)}") from error
        except _FINAL as error:
            raise InvalidArgument(f"{self.shown}: {_worded(error)}") from error
        except Exception as error:
            kind = InvalidArgument if _status(error) in _REFUSED else Unavailable
            raise kind(f"{self.shown}: {_worded(error)}") from error


def _http_options() -> dict[str, Any]:
    """Returns fsspec's options for HTTP: no limit on the time for a whole file, and the proxies of the environment."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}}


def _parts(wanted: Sequence[tuple[File, int]]) -> Iterator[tuple[File, int, int]]:
    """Yields file, offset and size of each block of the wanted files; size -1: the whole file, as its size is not known."""
    for file, begin in wanted:
        if file.byte_size < 0:
            yield file, 0, -1
            continue
        yield from (
            (file, at, min(BLOCK_BYTE_SIZE, file.byte_size - at))
            for at in range(begin, max(file.byte_size, begin + 1), BLOCK_BYTE_SIZE)
        )


def _file(path: str, name: str, info: Mapping[str, Any]) -> File:
    byte_size = info.get("size")
    identity = next((f"{key}={info[key]}" for key in _IDENTITIES if info.get(key)), "")
    return File(path, name, -1 if byte_size is None else int(byte_size), identity)


def is_inside(name: str) -> bool:
    """Returns whether a name is a path that stays inside a folder, on any operating system."""
    return (
        bool(name)
        and "\\" not in name
        and "\0" not in name
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def _status(error: BaseException) -> int:
    """Returns the HTTP status that an exception carries; 0: it carries none."""
    of_answer = getattr(getattr(error, "response", None), "status_code", 0)
    status = getattr(error, "status", 0) or of_answer
    return status if isinstance(status, int) else 0


def _worded(error: BaseException) -> str:
    """Returns an exception's message in one line, without the query strings of URLs, which may be secrets."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) and not str(error):
        return "no answer came in time"
    status, message = getattr(error, "status", None), getattr(error, "message", None)
    text = f"{status} {message}" if status and message else str(error)
    return re.sub(r"\?\S*", "", " ".join(text.split())) or type(error).__name__
