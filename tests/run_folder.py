"""Provides a folder that all processes of a test run share: the first one makes it and removes it at its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_VARIABLE = "PYTEST_TENSORD_RUN"


def make() -> Callable[[], None]:
    """Makes the folder unless another process has. Returns the function that removes it."""
    if _VARIABLE in os.environ:
        return lambda: None
    folder = os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="tensord-test-run-")

    def remove() -> None:
        del os.environ[_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)

    return remove


def programs() -> str:
    """Returns the folder where daemons and workers keep compiled programs, so that each is compiled once."""
    return os.path.join(os.environ[_VARIABLE], "programs")


@contextlib.contextmanager
def only_one(name: str) -> Iterator[Path]:
    """Yields the subfolder of that name, which no other process uses within the block."""
    folder = Path(os.environ[_VARIABLE], name)
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
