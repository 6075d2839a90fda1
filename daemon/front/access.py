"""Restricts calls to clients with a key: every call of every protocol belongs to a group that an operator may restrict.

This is the one table. A front looks its calls up when it starts, so a call that is not in it cannot be served at all.
Source: Triton docs/customization_guide/inference_protocols.md, "Limit Endpoint Access"; answers as recorded.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tensord.config.restrictions import Restriction
from tensord.shm.errors import Unavailable

#: The group of each call; calls have their name in gRPC's service, if any.
CALLS: Mapping[str, str] = {
    "ServerLive": "health",
    "ServerReady": "health",
    "ModelReady": "health",
    # grpc.health.v1.Health
    "Check": "health",
    "Watch": "health",
    "ServerMetadata": "metadata",
    # the description of the endpoints, over HTTP
    "OpenApi": "metadata",
    # grpc.reflection: which services and messages there are
    "ServerReflectionInfo": "metadata",
    "ModelMetadata": "metadata",
    "ModelInfer": "inference",
    "ModelStreamInfer": "inference",
    "InferStream": "inference",
    "Generate": "inference",
    "GenerateStream": "inference",
    "ModelConfig": "model-config",
    "ModelStatistics": "statistics",
    "RepositoryIndex": "model-repository",
    "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "PushParameters": "parameters",
    "ListParameters": "parameters",
    "DropParameters": "parameters",
    "RevertParameters": "parameters",
    "SystemSharedMemoryStatus": "shared-memory",
    "SystemSharedMemoryRegister": "shared-memory",
    "SystemSharedMemoryUnregister": "shared-memory",
    "CudaSharedMemoryStatus": "shared-memory",
    "CudaSharedMemoryRegister": "shared-memory",
    "CudaSharedMemoryUnregister": "shared-memory",
    "TraceSetting": "trace",
    "LogSettings": "logging",
}


class Restricted(Unavailable):
    """Raised where a call needs a key that the client did not send. Over HTTP it has a status of its own, 403."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Checks the header that a call needs."""

    #: The header's name in lower case.
    header: bytes
    value: bytes = field(repr=False)
    message: str

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Checks headers, with names in lower case; the first of the name counts. Raises Restricted."""
        for name, value in headers:
            if name == self.header:
                # The comparison takes constant time: how much of the key was right must not show.
                if hmac.compare_digest(value, self.value):
                    return
                break
        raise Restricted(self.message)


class Access:
    """Holds the access rules of one protocol."""

    def __init__(self, restrictions: Mapping[str, Restriction], sentence: str, prefix: str = "") -> None:
        """Takes the rules by group. ``sentence`` ends in the quoted name of the header; ``prefix`` begins that name."""
        self._rules = {
            group: Rule(
                (prefix + restriction.key).encode(),
                restriction.value.encode(),
                f"{sentence} '{prefix}{restriction.key}'",
            )
            for group, restriction in restrictions.items()
        }

    def rule(self, call: str) -> Rule | None:
        """Returns the rule of a call; None: it is open to everybody. Raises KeyError: the table does not know the call."""
        return self._rules.get(CALLS[call])


def http_access(restrictions: Mapping[str, Restriction]) -> Access:
    """Makes the rules for HTTP: the header is the key itself."""
    return Access(restrictions, "This API is restricted, expecting header")


def grpc_access(restrictions: Mapping[str, Restriction]) -> Access:
    """Makes the rules for gRPC: the key of the metadata has a prefix."""
    return Access(restrictions, "This protocol is restricted, expecting header", "triton-grpc-protocol-")
