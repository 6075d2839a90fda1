"""Lets a model's code load and unload other models by the daemon, and ask whether they are ready."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tensord.shm.errors import InvalidArgument
from tensord.shm.operations import LoadModel, ModelReady, UnloadModel
from tensord.workers.calls.caller import CallerPhase, asker

_MAX_FILES = 256
_MAX_BYTE_SIZE = 128 << 20


class NotAllowed(InvalidArgument):
    """Raised if the running code may not load, unload or ask about other models."""


def load(name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads or reloads a model, and waits until it is loaded.

    Raises ServingError: the model could not be loaded; NotAllowed: the running code may not load models.

    Args:
      config: a configuration in JSON that is used instead of the model's config.pbtxt; "": none.
      files: ``file:<version>/<name>`` -> content, of which the model consists; None: its files in the repository.
    """
    given = {path.removeprefix("file:"): bytes(content) for path, content in (files or {}).items()}
    total = sum(map(len, given.values()))
    if len(given) > _MAX_FILES or total > _MAX_BYTE_SIZE:
        raise InvalidArgument(
            f"{len(given)} files of {total} bytes together are given, at most {_MAX_FILES} of {_MAX_BYTE_SIZE} are allowed"
        )
    _ask(LoadModel(name, config, given))


def unload(name: str, dependents: bool = False) -> None:
    """Begins to unload a model. ``dependents``: if it is an ensemble, its models are unloaded too.

    Raises ServingError: the daemon refused; NotAllowed: the running code may not unload models.
    """
    _ask(UnloadModel(name, dependents))


def is_ready(name: str, version: int = 0) -> bool:
    """Returns whether a version of a model answers requests; 0: any version. Raises NotAllowed: the code may not ask."""
    return bool(json.loads(_ask(ModelReady(name, version))))


def _ask(operation: LoadModel | UnloadModel | ModelReady) -> bytes:
    found = asker()
    if found is None or found.port.server is None or found.phase is CallerPhase.APART:
        raise NotAllowed("models are loaded only by a model that is being loaded or served")
    return found.port.server.ask(operation, found.port)
