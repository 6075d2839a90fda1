"""How a model has others loaded and unloaded: part of ``triton_python_backend_utils`` (see ``interface``).

Source: triton-inference-server/python_backend, README "Model Loading API" and src/model_loader.cc, whose words the errors are in.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensord.shm.errors import InvalidArgument
from tensord.workers.calls import other_models
from tensord.workers.python_backend.errors import Saying, TritonModelException


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
    with _Asking("Failed to load model"):
        other_models.load(model_name, config, files)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Begins to take it away. Raises TritonModelException."""
    with _Asking("Failed to unload model"):
        other_models.unload(model_name, unload_dependents)


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
    with _Asking("Failed to check model readiness"):
        return other_models.is_ready(model_name, number)


class _Asking(Saying):
    """In Triton's words where nobody may ask."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, other_models.NotAllowed):
            error = InvalidArgument(
                "the model loading API is not supported during the 'auto_complete_config' and 'finalize' functions."
            )
        super().__exit__(kind, error, traceback)
