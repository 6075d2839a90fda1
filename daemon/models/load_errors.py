"""Makes the messages of failed loads, in Triton's sentences."""

from __future__ import annotations

from collections.abc import Iterable


def load_error(name: str, failed: dict[int, str]) -> str:
    """Returns Triton's message for versions of a model that failed to load. ``failed``: the reason by version number."""
    listed = "".join(f"version {n} is at UNAVAILABLE state: {reason};\n" for n, reason in sorted(failed.items()))
    return f"load failed for model '{name}': {listed}"


def placement_error(name: str, reason: str) -> str:
    """Returns Triton's message for a model that no worker can load."""
    return f"load failed for model '{name}': {reason}\n"


def no_version_error(name: str) -> str:
    """Returns Triton's message for a model whose version policy chooses no version."""
    return (
        f"load failed for model '{name}': "
        f"at least one version must be available under the version policy of model '{name}'\n"
    )


def poll_error(names: Iterable[str]) -> str:
    """Returns Triton's message for models that are missing or cannot be read."""
    return f"failed to load '{', '.join(names)}', failed to poll from model repository"


def given_error(name: str, reason: str) -> str:
    """Returns the message for a client's configuration or files that cannot be used; Triton would only say ``poll_error``."""
    return f"failed to load '{name}': {reason}"
