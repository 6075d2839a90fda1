"""Keeps files in a cache directory and makes sure that only this user has written them, because the files are code.

    <name>         | a constant of 22 bytes | HMAC-SHA256 of name and content, 32 bytes | content |
    <name>.lock    | an empty file, locked while a process makes the file <name> |
    secret         | the key of the HMAC: 32 random bytes, mode 0600 |

A file is used only if three conditions hold. Every use checks the three conditions again.
1. The directory belongs to this user, nobody else may write to it, and no other user can replace a directory above it.
2. The file is a regular file of this user that nobody else can write to. It is not a link.
3. The HMAC is right: a process that can read the secret wrote the complete file, under this name.
If condition 1 fails, no file is read or written. If condition 2 or 3 fails, the file is removed and a warning is logged.
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

from tensord.shm.seldom import Seldom

_log = logging.getLogger(__name__)
_MAGIC = b"tensord-executable-4\r\n"
_SECRET = "secret"
_SECRET_BYTES = 32
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size
#: Prefix of files that are being written; an old one was left by a process that was killed.
_NEW = "new-"
_NEW_SECONDS = 3600.0
#: Suffix of the lock that is held while a file is made.
_LOCK = ".lock"
#: How often a process that waits for a lock tries it.
_LOCK_SECONDS = 0.02
#: Suffixes of the cache's files; no others are ever touched.
SUFFIXES = (".executable", ".program", ".rows")
#: Permissions that other users must not have: a user who can write to the directory could run code as this user.
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
#: Errors of opening a link, a socket, and a file that this user may not read.
_NOT_OURS = (errno.ELOOP, errno.ENXIO, errno.EACCES)
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


class CacheDirectory:
    """The files of a cache directory, by name. Several threads and processes may use it at the same time."""

    def __init__(self, path: Path) -> None:
        """Opens the directory, or makes it if it is missing. Afterwards only this user may enter it (mode 0700).

        If other users could write to it, removes the cache's files.
        Raises OSError: the directory cannot be made, belongs to another user, or could be replaced by another user.
        """
        self.path = Path(os.path.realpath(path))
        self._seldom = Seldom()
        if self.path.parent == self.path:
            raise PermissionError("the root directory cannot be a cache")
        with self._opened() as (directory_fd, mode):
            if mode & _WRITABLE:
                # Emptied: any user may have written these files. A directory that was only readable holds this user's files.
                _log.warning(
                    "cache directory %s was open to others (mode %04o): its files are removed and nobody else may enter it now",
                    self.path,
                    mode,
                )
            if mode & 0o077:
                os.fchmod(directory_fd, 0o700)
            _tidy(directory_fd, empty=bool(mode & _WRITABLE))

    def read(self, name: str) -> bytes | None:
        """Returns the content of the file ``name``; None: it does not exist, or cannot be read.

        A file that another user could have written, or whose HMAC is wrong, is removed.
        """
        try:
            with self._alone() as directory_fd:
                secret = self._secret(directory_fd)
                try:
                    return _content(directory_fd, name, secret)
                except FileNotFoundError:
                    return None
                except ValueError as error:
                    self._remove(directory_fd, name, error)
                    return None
        except OSError as error:
            self.say_unusable(error)
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file atomically. Raises OSError: writing fails, or other users can change the directory."""
        with self._alone() as directory_fd:
            head = _MAGIC + _seal(self._secret(directory_fd), name, content)
            with _written(directory_fd, head, content) as new:
                os.rename(new, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)

    @contextlib.contextmanager
    def sole(self, name: str, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Holds a lock during the block, so that only one thread of all processes makes the file ``name``.

        The lock ends with its process. If locking is impossible, the block runs without a lock. ``check``: called again and
        again during the wait for the lock; an error that it raises ends the wait.
        """
        try:
            lock = self._locked(f"{name}{_LOCK}", check)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError), self._alone() as directory_fd:
                os.unlink(f"{name}{_LOCK}", dir_fd=directory_fd)
            # Closing is not enough: a process that a model forked has the descriptor too.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _locked(self, name: str, check: Callable[[], None]) -> int:
        while True:
            with self._alone() as directory_fd:
                lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=directory_fd)
            try:
                # A blocking call could not be cancelled, and others may make the file for a very long time.
                while not _locks(lock):
                    check()
                    time.sleep(_LOCK_SECONDS)
                if os.fstat(lock).st_nlink:
                    return lock
            except BaseException:
                os.close(lock)
                raise
            # Its former holder has removed it, and a later one may hold a new file.
            os.close(lock)

    def say_unusable(self, error: OSError) -> None:
        """Logs an error that makes the cache unusable, at most once a minute."""
        # A full disk causes it for every program.
        if self._seldom.is_due():
            # An error without a number was raised here, and already names the directory.
            reason = f"directory {self.path}: {error.strerror}" if error.errno else error.strerror or error
            _log.warning("executables are not cached: %s", reason)

    def remove(self, name: str, reason: Exception) -> None:
        """Removes the file ``name``, which cannot be used, and logs the reason."""
        with contextlib.suppress(OSError), self._alone() as directory_fd:
            self._remove(directory_fd, name, reason)

    def _remove(self, directory_fd: int, name: str, reason: Exception) -> None:
        _log.warning("removing cached executable %s: %s: %s", name, type(reason).__name__, reason)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory_fd)

    # ------------------------------------------------------------------------------------------------------- the directory

    @contextlib.contextmanager
    def _alone(self) -> Iterator[int]:
        with self._opened() as (directory_fd, mode):
            if mode & _WRITABLE:
                raise PermissionError(f"directory {self.path} is open to others (mode {mode:04o})")
            yield directory_fd

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        # Links in the path were resolved when this object was made. The directory to which a changed link leads is checked as
        # well.
        *above, last = self.path.parts[1:]
        with contextlib.ExitStack() as stack:
            directory_fd = os.open("/", _PLACE)
            stack.callback(os.close, directory_fd)
            for count, name in enumerate(above):
                _check_above(directory_fd, Path("/", *above[:count]))
                directory_fd = _open(stack, name, directory_fd, _PLACE)
            _check_above(directory_fd, self.path.parent)
            directory_fd = _open(stack, last, directory_fd, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            found = os.fstat(directory_fd)
            if found.st_uid != os.geteuid():
                raise PermissionError(f"directory {self.path} belongs to another user (uid {found.st_uid})")
            yield directory_fd, stat.S_IMODE(found.st_mode)

    def _secret(self, directory_fd: int) -> bytes:
        """Returns the directory's HMAC key. Makes the key if it is missing."""
        try:
            return _read_secret(directory_fd)
        except FileNotFoundError:
            pass
        except ValueError as error:
            # Files that were sealed with it are removed when they are read.
            self._remove(directory_fd, _SECRET, error)
        with _written(directory_fd, secrets.token_bytes(_SECRET_BYTES)) as new, contextlib.suppress(FileExistsError):
            # If two processes make one, both use the first.
            os.link(new, _SECRET, src_dir_fd=directory_fd, dst_dir_fd=directory_fd, follow_symlinks=False)
        return _read_secret(directory_fd)


def _open(stack: contextlib.ExitStack, name: str, above: int, flags: int) -> int:
    """Opens or makes a directory. Returns its descriptor, which ``stack`` closes. ``above``: the parent's descriptor."""
    try:
        directory_fd = os.open(name, flags, dir_fd=above)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
        directory_fd = os.open(name, flags, dir_fd=above)
    stack.callback(os.close, directory_fd)
    return directory_fd


def _check_above(directory_fd: int, path: Path) -> None:
    found = os.fstat(directory_fd)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()) or (mode & _WRITABLE and not mode & stat.S_ISVTX):
        raise PermissionError(
            0, f"others could exchange what is in directory {path} (uid {found.st_uid}, mode {mode:04o})"
        )


# ---------------------------------------------------------------------------------------------------------------- files


def _content(directory_fd: int, name: str, secret: bytes) -> bytes:
    whole = _bytes(directory_fd, name)
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


def _read_secret(directory_fd: int) -> bytes:
    found = _bytes(directory_fd, _SECRET, forbidden=0o077)
    if len(found) != _SECRET_BYTES:
        raise ValueError(f"{len(found)} bytes, expected {_SECRET_BYTES}")
    return found


def _bytes(directory_fd: int, name: str, forbidden: int = _WRITABLE) -> bytes:
    try:
        # O_NONBLOCK, because opening a pipe would wait.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fd)
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
        if found.st_mode & forbidden:
            raise ValueError(f"it is open to others (mode {stat.S_IMODE(found.st_mode):04o})")
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


@contextlib.contextmanager
def _written(directory_fd: int, *parts: bytes) -> Iterator[str]:
    """Writes ``parts`` into a new file, and yields its random name. At the end of the ``with`` block deletes the file."""
    name = _NEW + secrets.token_hex(16)
    try:
        with open(
            os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory_fd), "wb"
        ) as file:
            for part in parts:
                file.write(part)
        yield name
    finally:
        # The caller may have renamed it.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory_fd)


def _locks(fd: int) -> bool:
    """Locks a file, without waiting. Returns False if somebody else has locked it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tidy(directory_fd: int, *, empty: bool) -> None:
    """Deletes a cache's temporary and lock files older than an hour. If ``empty`` is True, deletes all files of the cache."""
    for name in os.listdir(directory_fd):
        kept = empty and (name == _SECRET or name.endswith(SUFFIXES))
        with contextlib.suppress(OSError):
            if kept or name.startswith(_NEW) or name.endswith(_LOCK):
                written = os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mtime
                if empty or written < time.time() - _NEW_SECONDS:
                    os.unlink(name, dir_fd=directory_fd)
