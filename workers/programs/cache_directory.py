"""A directory of files that are code, so nobody but this user may have written them.

    <name>         | magic 22 | HMAC-SHA256 of name and content 32 | content |
    <name>.lock    | empty, and locked, while somebody makes that file |
    secret         | 32 random bytes, mode 0600, made with the first file |

Three things have to hold before a byte is used. The directory is ours alone, and so is every one above it in that nobody else
can put another in its place (a sticky /tmp will do). The file is a regular one of ours that nobody else can write. And its HMAC
is right, which says at once that it is whole, that it was written under this name, and that somebody wrote it who can read our
secret. Links are never followed. What fails is removed, said in the log, and made anew by whoever asked.

The directory is opened and judged anew at every use, so no descriptor is kept and no earlier judgement is relied upon.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tensord.config.log import Seldom

_log = logging.getLogger(__name__)
_MAGIC = b"tensord-executable-4\r\n"
_SECRET = "secret"
_SECRET_BYTES = 32
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size
#: Files that are being written; one so old is of a process that was killed meanwhile.
_NEW = "new-"
_NEW_SECONDS = 3600.0
#: What is locked while a file is made.
_LOCK = ".lock"
#: Who waits for it looks as often.
_LOCK_SECONDS = 0.02
#: What files of ours end with; nothing else is ever touched.
SUFFIXES = (".executable", ".program")
#: Others may list and enter it, but whoever can write here could run code as us.
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
#: How a link, a socket and a file that we may not read answer.
_NOT_OURS = (errno.ELOOP, errno.ENXIO, errno.EACCES)
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


class CacheDirectory:
    """Reads, writes and removes files by their names. Used by several threads and processes; the file system orders them."""

    def __init__(self, path: Path) -> None:
        """Makes it where it is not there. Raises OSError: there can be none, or others could change it."""
        self.path = Path(os.path.realpath(path))
        self._seldom = Seldom()
        if self.path.parent == self.path:
            raise PermissionError("the root directory cannot be a cache")
        with self._opened() as (place, mode):
            if mode & _WRITABLE:
                # Emptied: what lies there could be anybody's. One that was only readable holds what we wrote.
                _log.warning(
                    "cache directory %s was open to others (mode %04o): its files are removed and nobody else may enter it now",
                    self.path,
                    mode,
                )
                os.fchmod(place, 0o700)
                _remove_all(place)
            elif mode & 0o077:
                os.fchmod(place, 0o700)
            _remove_old(place)

    def read(self, name: str) -> bytes | None:
        """The content of that file; None where there is none, or none of ours."""
        try:
            with self._alone() as place:
                secret = self._secret(place)
                try:
                    return _content(place, name, secret)
                except FileNotFoundError:
                    return None
                except ValueError as error:
                    self._remove(place, name, error)
                    return None
        except OSError as error:
            self.say_unusable(error)
            return None

    def write(self, name: str, content: bytes) -> None:
        """Replaces that file, at once and whole. Raises OSError: no room, or others could change the directory."""
        with self._alone() as place:
            head = _MAGIC + _seal(self._secret(place), name, content)
            with _written(place, head, content) as new:
                os.rename(new, name, src_dir_fd=place, dst_dir_fd=place)

    @contextlib.contextmanager
    def sole(self, name: str, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Whoever makes that file makes it alone: others, in this process and in others, wait. The lock ends with its holder.

        Where there can be no lock, two may make the same. ``check``: called while it waits; what it raises ends that.
        """
        try:
            lock = self._locked(f"{name}{_LOCK}", check)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError), self._alone() as place:
                os.unlink(f"{name}{_LOCK}", dir_fd=place)
            # Said, because a process that a model forked has the descriptor too.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _locked(self, name: str, check: Callable[[], None]) -> int:
        """A locked file of that name, which is there."""
        while True:
            with self._alone() as place:
                lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
            try:
                # Not in one call, which nothing could end: others may make it for a very long time.
                while not _locks(lock):
                    check()
                    time.sleep(_LOCK_SECONDS)
                if os.fstat(lock).st_nlink:
                    return lock
            except BaseException:
                os.close(lock)
                raise
            # Who had it has removed it, and a later one may hold another.
            os.close(lock)

    def say_unusable(self, error: OSError) -> None:
        """Once a minute: a full disk would be named with every program."""
        if self._seldom.is_due():
            # An error of ours names what is wrong with which directory.
            reason = f"directory {self.path}: {error.strerror}" if error.errno else error.strerror or error
            _log.warning("executables are not cached: %s", reason)

    def remove(self, name: str, reason: Exception) -> None:
        """Takes a file away that cannot be used, and says so."""
        with contextlib.suppress(OSError), self._alone() as place:
            self._remove(place, name, reason)

    def _remove(self, place: int, name: str, reason: Exception) -> None:
        _log.warning("removing cached executable %s: %s: %s", name, type(reason).__name__, reason)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=place)

    # ------------------------------------------------------------------------------------------------------- the directory

    @contextlib.contextmanager
    def _alone(self) -> Iterator[int]:
        """A descriptor of the directory. Raises OSError: others can write to it."""
        with self._opened() as (place, mode):
            if mode & _WRITABLE:
                raise PermissionError(f"directory {self.path} is open to others (mode {mode:04o})")
            yield place

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        """A descriptor and the mode. Raises OSError: it is not ours, or one above it is not safe.

        Links on the way were resolved once. Whoever can bend one leads us to another directory, which is judged like this one.
        """
        *above, last = self.path.parts[1:]
        with contextlib.ExitStack() as stack:
            place = os.open("/", _PLACE)
            stack.callback(os.close, place)
            for count, name in enumerate(above):
                _check_above(place, Path("/", *above[:count]))
                place = _open(stack, name, place, _PLACE)
            _check_above(place, self.path.parent)
            place = _open(stack, last, place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            found = os.fstat(place)
            if found.st_uid != os.geteuid():
                raise PermissionError(f"directory {self.path} belongs to another user (uid {found.st_uid})")
            yield place, stat.S_IMODE(found.st_mode)

    def _secret(self, place: int) -> bytes:
        """Ours, made where there is none. Two who make one at the same time agree on the first."""
        try:
            return _read_secret(place)
        except FileNotFoundError:
            pass
        except ValueError as error:
            # Everything that was sealed with it is removed as it is met.
            self._remove(place, _SECRET, error)
        with _written(place, secrets.token_bytes(_SECRET_BYTES)) as new, contextlib.suppress(FileExistsError):
            os.link(new, _SECRET, src_dir_fd=place, dst_dir_fd=place, follow_symlinks=False)
        return _read_secret(place)


def _open(stack: contextlib.ExitStack, name: str, above: int, flags: int) -> int:
    """A directory, made for this user alone where it is not there; its descriptor lives as long as ``stack``."""
    try:
        place = os.open(name, flags, dir_fd=above)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
        place = os.open(name, flags, dir_fd=above)
    stack.callback(os.close, place)
    return place


def _check_above(place: int, path: Path) -> None:
    """Raises PermissionError: somebody else could rename what is in that directory."""
    found = os.fstat(place)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()) or (mode & _WRITABLE and not mode & stat.S_ISVTX):
        raise PermissionError(
            0, f"others could exchange what is in directory {path} (uid {found.st_uid}, mode {mode:04o})"
        )


# ---------------------------------------------------------------------------------------------------------------- files


def _content(place: int, name: str, secret: bytes) -> bytes:
    """Raises OSError: there is no such file.  ValueError: it is not ours, or not as we wrote it."""
    whole = _bytes(place, name)
    content = whole[_HEAD:]
    if whole[: len(_MAGIC)] != _MAGIC or not hmac.compare_digest(
        whole[len(_MAGIC) : _HEAD], _seal(secret, name, content)
    ):
        raise ValueError("the entry is damaged, or was not written here")
    return content


def _seal(secret: bytes, name: str, content: bytes) -> bytes:
    made = hmac.new(secret, name.encode() + b"\0", hashlib.sha256)
    made.update(content)
    return made.digest()


def _read_secret(place: int) -> bytes:
    found = _bytes(place, _SECRET, others=0o077)
    if len(found) != _SECRET_BYTES:
        raise ValueError(f"{len(found)} bytes, expected {_SECRET_BYTES}")
    return found


def _bytes(place: int, name: str, others: int = _WRITABLE) -> bytes:
    """Of a regular file of ours of which others have none of those permissions. Raises OSError, ValueError."""
    try:
        # Without O_NONBLOCK a pipe would be waited for.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise ValueError(f"it cannot be opened: {error.strerror}") from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_uid != os.geteuid():
            raise ValueError(f"it belongs to another user (uid {found.st_uid})")
        if found.st_mode & others:
            raise ValueError(f"it is open to others (mode {stat.S_IMODE(found.st_mode):04o})")
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


@contextlib.contextmanager
def _written(place: int, *parts: bytes) -> Iterator[str]:
    """The name of a new file with that content; it is gone after the block unless it was renamed."""
    name = _NEW + secrets.token_hex(16)
    try:
        with open(
            os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=place), "wb"
        ) as file:
            for part in parts:
                file.write(part)
        yield name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place)


def _locks(fd: int) -> bool:
    """Returns whether it is locked for the caller now. Raises OSError: there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_all(place: int) -> None:
    """Every name that we give; files that are none of ours lie there for some other reason."""
    for name in os.listdir(place):
        if name == _SECRET or name.startswith(_NEW) or name.endswith((*SUFFIXES, _LOCK)):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=place)


def _remove_old(place: int) -> None:
    """What killed processes left half written."""
    for name in os.listdir(place):
        if name.startswith(_NEW) or name.endswith(_LOCK):
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=place, follow_symlinks=False).st_mtime < time.time() - _NEW_SECONDS:
                    os.unlink(name, dir_fd=place)
