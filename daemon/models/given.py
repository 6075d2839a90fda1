"""Keeps the files and the configurations that clients sent with a load of a model.

The files of a model stay on the disk as long as the model is served from them:

    <temporary folder, mode 0700>/<serial number>/<model>/<version>/model.py

The daemon locks the temporary folder, so that neither systemd-tmpfiles nor a new daemon removes it. Call ``GivenModels.keep``
and ``GivenModels.drop`` off the event loop.
Source: Triton docs/protocol/extension_model_repository.md, "file:<version>/<file-name>".
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path

from tensord.daemon.models.repository import NAME, FoundModel, given_error
from tensord.shm.errors import InvalidArgument, Unavailable

_MAX_DEPTH = 8
_PREFIX = "tensord-models-"


class GivenModels:
    """Stores the files of models that clients have sent, in one temporary folder."""

    def __init__(self, place: Path | None = None) -> None:
        """Removes the model files that a crashed daemon left in ``place``.

        ``place``: the folder in which this object will make a temporary folder for model files. If it is None, $TMPDIR is used.
        """
        for left in place.glob(f"{_PREFIX}*") if place is not None else ():
            if (lock := _locked(left)) >= 0:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        self._place = place
        #: A descriptor of the temporary folder, by which it is locked.
        self._lock = -1
        #: name -> its folders: one may be served, others may be new or on their way out.
        self._folders: dict[str, list[Path]] = {}
        #: Folders whose load is not over.
        self._coming: set[Path] = set()
        self._root: tempfile.TemporaryDirectory[str] | None = None
        #: Held by the thread that makes it: ``keep`` runs in several.
        self._making = threading.Lock()
        self._serials = itertools.count(1)

    def keep(self, name: str, files: Mapping[str, bytes]) -> Path:
        """Writes the files of a model to a new folder that has the model's name, and returns that folder.

        ``files``: the content of each file by its path ``<version>/<file-name>``. If an error is raised, nothing stays on the
        disk.
        Raises InvalidArgument if a path is not allowed or given twice. Raises OSError if the disk has no room or cannot be
        written.
        """
        files = _checked(files)
        with self._making:
            if self._root is None:
                self._root = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self._place)
                self._lock = _locked(Path(self._root.name))
        folder = Path(self._root.name, str(next(self._serials)), name)
        try:
            for path, content in files.items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        except BaseException:
            self.drop(folder)
            raise
        return folder

    @contextlib.asynccontextmanager
    async def coming(self, name: str, files: Mapping[str, bytes]) -> AsyncIterator[Path]:
        """Writes the files of a model and yields their folder, which ``drop_unused`` keeps until the ``async with`` block ends.

        ``files``: the content of each file by its path ``<version>/<file-name>``.
        Raises InvalidArgument if a path is not allowed or given twice. Raises Unavailable if the disk has no room or cannot be
        written.
        """
        try:
            folder = await asyncio.to_thread(self.keep, name, files)
        except InvalidArgument as error:
            raise InvalidArgument(given_error(name, error.message)) from None
        except OSError as error:
            reason = f"its files cannot be kept: {error.strerror}"
            raise Unavailable(given_error(name, reason)) from None
        self._coming.add(folder)
        self._folders.setdefault(name, []).append(folder)
        try:
            yield folder
        finally:
            self._coming.discard(folder)

    def serves(self, name: str, needed: Collection[str]) -> bool:
        """Returns whether any path in ``needed`` is a folder of files that a client sent for the model ``name``."""
        return any(str(folder) in needed for folder in self._folders.get(name, ()))

    def drop_unused(self, name: str, needed: Collection[str]) -> None:
        """Deletes the folders of files that clients sent for the model ``name``.

        Keeps folders that ``needed`` contains, and folders that ``coming`` yielded to an ``async with`` block that still runs.
        """
        folders = self._folders.pop(name, [])
        kept = [folder for folder in folders if str(folder) in needed or folder in self._coming]
        if kept:
            self._folders[name] = kept
        for folder in folders:
            if folder not in kept:
                asyncio.get_running_loop().run_in_executor(None, self.drop, folder)

    @staticmethod
    def drop(folder: Path) -> None:
        """Removes a folder that ``keep`` returned. May be called again."""
        shutil.rmtree(folder.parent, ignore_errors=True)

    def close(self) -> None:
        """Removes all model files that clients have sent."""
        if self._root is not None:
            self._root.cleanup()
            self._root = None
            if self._lock >= 0:
                os.close(self._lock)


def _locked(folder: Path) -> int:
    """Opens and locks a folder. Returns the descriptor, or -1 if that fails."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return -1
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(opened)
        return -1
    return opened


def _checked(files: Mapping[str, bytes]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for given, content in files.items():
        path = given.lstrip("/")
        parts = path.split("/")
        if len(parts) > _MAX_DEPTH or not all(NAME.fullmatch(part) for part in parts):
            raise InvalidArgument(f"'{given[:200]}' is no path of a file in a model: expected <version>/<file-name>")
        if path in found:
            raise InvalidArgument(f"file '{path[:200]}' is given twice")
        found[path] = content
    for path in found:
        for folder in itertools.accumulate(path.split("/")[:-1], "{}/{}".format):
            if folder in found:
                raise InvalidArgument(f"'{folder[:200]}' is given as a file, and '{path[:200]}' beneath it")
    return found


class Overrides:
    """Configurations that clients sent with successful loads.

    Each holds until the files of its model change or the model is unloaded.
    """

    def __init__(self) -> None:
        #: name -> (fingerprint of the files it was given for, configuration in JSON).
        self._kept: dict[str, tuple[str, str]] = {}

    def of(self, found: FoundModel) -> str:
        """Returns the configuration (JSON) that a client has sent for a model's current files, or "" if there is none."""
        fingerprint, given = self._kept.get(found.name, ("", ""))
        return given if fingerprint == found.fingerprint else ""

    def keep(self, found: FoundModel, given: str) -> None:
        """Stores ``given``, a client's configuration (JSON) of a loaded model. If ``given`` is "", removes the stored one."""
        if given:
            self._kept[found.name] = (found.fingerprint, given)
        else:
            self.drop(found.name)

    def drop(self, name: str) -> None:
        """Removes the configuration with which a client overrode the file of the model ``name``, if there is one."""
        self._kept.pop(name, None)

    def __repr__(self) -> str:
        return f"<Overrides of {sorted(self._kept)}>"
