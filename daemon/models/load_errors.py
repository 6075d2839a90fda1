"""Words the errors of failed loads, in Triton's sentences."""

from __future__ import annotations

from collections.abc import Iterable


def load_error(name: str, failed: dict[int, str]) -> str:
    """Words Triton's sentence for versions that failed to load."""
    listed = "".join(f"version {n} is at UNAVAILABLE state: {reason};\n" for n, reason in sorted(failed.items()))
    return f"load failed for model '{name}': {listed}"


def placement_error(name: str, reason: str) -> str:
    """Words Triton's sentence for a model whose instances can be placed nowhere."""
    return f"load failed for model '{name}': {reason}\n"


def no_version_error(name: str) -> str:
    """Words Triton's sentence for a model without a version that its policy chooses."""
    return (
        f"load failed for model '{name}': "
        f"at least one version must be available under the version policy of model '{name}'\n"
    )


def poll_error(names: Iterable[str]) -> str:
    """Words Triton's sentence for a model that is missing or cannot be read."""
    return f"failed to load '{', '.join(names)}', failed to poll from model repository"


def given_error(name: str, reason: str) -> str:
    """Words the error for a client's configuration or files that cannot be used. Triton would only say ``poll_error`` here."""
    return f"failed to load '{name}': {reason}"
