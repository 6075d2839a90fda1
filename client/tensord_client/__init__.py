"""The client of tensord: calls JAX models on a server, on this host or another one, as functions of numpy arrays.

    client = tensord_client.connect()
    policy = client.model("policy", timeout=0.2)
    actions = policy({"image": frame, "state": q})["actions"]

Models have the methods of ``tensord.testing.Model``. Only numpy must be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensord_client.client import Client, connect
from tensord_client.common.latest import Latest
from tensord_client.common.model import Model, ModelSequence
from tensord_client.common.results import Answer, Tensor, Timing
from tensord_client.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    Replaced,
    ResultsHeld,
    ServingError,
    Unavailable,
    Unknown,
    Unsupported,
)

if TYPE_CHECKING:
    from tensord_client.asynchronous import AsyncClient, AsyncModel, connect_async
    from tensord_client.in_jax import jax

__all__ = [
    "AlreadyExists",
    "Answer",
    "AsyncClient",
    "AsyncModel",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "Internal",
    "InvalidArgument",
    "Latest",
    "Model",
    "ModelSequence",
    "NotFound",
    "Replaced",
    "ResultsHeld",
    "ServingError",
    "Tensor",
    "Timing",
    "Unavailable",
    "Unknown",
    "Unsupported",
    "connect",
    "connect_async",
    "jax",
]
_ASYNCHRONOUS = ("AsyncClient", "AsyncModel", "connect_async")


def __getattr__(name: str) -> Any:
    """Imports an attribute of this module at its first use."""
    if name in _ASYNCHRONOUS:
        from tensord_client import asynchronous

        return getattr(asynchronous, name)
    if name == "jax":
        from tensord_client import in_jax

        return in_jax.jax
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib.metadata

    try:
        return importlib.metadata.version("tensord-client")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
