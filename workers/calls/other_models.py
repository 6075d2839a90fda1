"""Functions by which a model has the daemon load and unload other models, and asks whether they are ready."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tensord.shm.errors import InvalidArgument
from tensord.shm.operations import LoadModel, ModelReady, UnloadModel
from tensord.workers.calls.caller import CallerPhase, asker

_MAX_FILES = 256
_MAX_BYTE_SIZE = 128 << 20


class NotAllowed(InvalidArgument):
    """Raised where code may not ask for other models."""


def load(name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads a model, or loads it anew, and waits for that. Raises ServingError: it could not be loaded; NotAllowed.

    Args:
      config: a configuration in JSON that takes the place of its config.pbtxt.
      files: ``file:<version>/<name>`` -> content; the model consists of these.
    """
    given = {path.removeprefix("file:"): bytes(content) for path, content in (files or {}).items()}
    total = sum(map(len, given.values()))
    if len(given) > _MAX_FILES or total > _MAX_BYTE_SIZE:
        raise InvalidArgument(
            f"{len(given)} files of {total} bytes together are given, at most {_MAX_FILES} of {_MAX_BYTE_SIZE} are allowed"
        )
    _ask(LoadModel(name, config, given))


def unload(name: str, dependents: bool = False) -> None:
    """Begins to unload a model; ``dependents``: with its models, where it is an ensemble. Raises ServingError; NotAllowed."""
    _ask(UnloadModel(name, dependents))


def is_ready(name: str, version: int = 0) -> bool:
    """Returns whether a version, or any (0), answers requests. Raises NotAllowed."""
    return bool(json.loads(_ask(ModelReady(name, version))))


def _ask(operation: LoadModel | UnloadModel | ModelReady) -> bytes:
    found = asker()
    if found is None or found.port.server is None or found.phase is CallerPhase.APART:
        raise NotAllowed("models are loaded only by a model that is being loaded or served")
    return found.port.server.ask(operation, found.port)
