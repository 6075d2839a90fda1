"""The folder that all processes of a run of the tests share, be they several of pytest's: made by the first and gone with it."""

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
    """Makes it, unless another process has. Returns what takes it away again."""
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
    """The folder of that name, which nobody else uses within the block."""
    folder = Path(os.environ[_VARIABLE], name)
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
