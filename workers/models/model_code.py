"""A model's own Python code, run so that nothing of one model is visible to another.

Each ``model.py`` gets a module of its own name, made from its source every time; modules that it imports from its own folders are
forgotten by ``sys.modules`` when it is loaded, so that the next model's ``labels.py`` is its own.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from shm.errors import InvalidArgument
from workers.models import python_backend


def install_python_backend() -> None:
    """Lets models import ``triton_python_backend_utils``."""
    sys.modules["triton_python_backend_utils"] = python_backend
    sys.modules["c_python_backend_utils"] = python_backend


def import_model(path: Path, name: str) -> ModuleType:
    """Runs a model.py as a module of that name, always from its source: compiled copies are trusted by time stamp only."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path.name} cannot be read: {error.strerror}") from error
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def own_folders(*folders: Path) -> Iterator[None]:
    """Lets a model import what lies beside it, for the time of its loading, and leaves no trace in a folder that is not ours."""
    before = set(sys.modules)
    paths = [str(folder) for folder in folders]
    writes_nothing = sys.dont_write_bytecode
    sys.path[:0] = paths
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_nothing
        for path in paths:
            sys.path.remove(path)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and not name.startswith("tensord_model_") and any(map(Path(file).is_relative_to, folders)):
                del sys.modules[name]


def python_source(folder: Path) -> bytes:
    """Every Python file of a version's folder, with its name."""
    pieces: list[bytes] = []
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        pieces.append(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return b"".join(pieces)
