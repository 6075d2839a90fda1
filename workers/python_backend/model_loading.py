"""How a model has others loaded and unloaded: part of ``triton_python_backend_utils`` (see ``interface``).

Source: triton-inference-server/python_backend, README "Model Loading API" and src/model_loader.cc, whose words the errors are in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from shm.errors import ServingError
from shm.operations import LoadModel, ModelReady, UnloadModel
from workers.calls.caller import Phase, caller
from workers.python_backend.errors import TritonModelException

_MAX_FILES = 256
_MAX_BYTE_SIZE = 128 << 20


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads it, or loads it anew, and waits for that. Raises TritonModelException: it could not be loaded.

    Args:
      config: a configuration in JSON that takes the place of its config.pbtxt.
      files: ``file:<version>/<name>`` -> content; the model consists of these.
    """
    if not isinstance(files, Mapping | None):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    given = {path.removeprefix("file:"): bytes(content) for path, content in (files or {}).items()}
    total = sum(map(len, given.values()))
    if len(given) > _MAX_FILES or total > _MAX_BYTE_SIZE:
        raise TritonModelException(
            f"Failed to load model: {len(given)} files of {total} bytes together are given, "
            f"at most {_MAX_FILES} of {_MAX_BYTE_SIZE} are allowed"
        )
    _ask("Failed to load model", LoadModel(model_name, config, given))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begins to take it away. Raises TritonModelException."""
    _ask("Failed to unload model", UnloadModel(model_name, unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether requests for it are answered. Raises TritonModelException: the version is no number."""
    number = 0
    if model_version:
        if not model_version.isdecimal() or int(model_version) < 1:
            raise TritonModelException(
                f"Failed to check model readiness: failed to get model version from specified version string '{model_version}', "
                "version should be an integral value > 0"
            )
        number = int(model_version)
    return bool(json.loads(_ask("Failed to check model readiness", ModelReady(model_name, number))))


def _ask(begins: str, operation: LoadModel | UnloadModel | ModelReady) -> bytes:
    found = caller()
    if found is None or found.port.desk is None or found.phase is Phase.APART:
        raise TritonModelException(
            f"{begins}: the model loading API is not supported during the 'auto_complete_config' and 'finalize' functions."
        )
    try:
        return found.port.desk.ask(operation, found.port)
    except ServingError as error:
        raise TritonModelException(f"{begins}: {error.message}") from None
