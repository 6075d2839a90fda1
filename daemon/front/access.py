"""Restricts calls to clients that send a key: every call belongs to a group that an operator may restrict.

``CALLS`` has all calls. A front looks its calls up when it starts, so a call that is missing there cannot be served at all.
Source: Triton docs/customization_guide/inference_protocols.md, "Limit Endpoint Access"; errors are those of a real Triton.
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


#: Protocol -> the word for its calls in error messages, and the prefix of the names of access headers.
_WORDS = {"http": ("API", ""), "grpc": ("protocol", "triton-grpc-protocol-")}


class Restricted(Unavailable):
    """Raised when a call needs an access key that the client did not send: HTTP status 403, or UNAVAILABLE over gRPC."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Lets a call pass only if the request has a certain header with a certain value, the access key."""

    #: The header's name in lower case.
    header: bytes
    value: bytes = field(repr=False)
    message: str

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises Restricted if a request does not have the header ``self.header`` with the value ``self.value``.

        ``headers``: the request's headers as (name, value), with names in lower case. If the request has several headers with
        the name ``self.header``, only the first one counts.
        """
        for name, value in headers:
            if name == self.header:
                # The comparison takes constant time: how much of the key was right must not show.
                if hmac.compare_digest(value, self.value):
                    return
                break
        raise Restricted(self.message)


class Access:
    """The access rules of one protocol: which calls need an access key, and in which header."""

    def __init__(self, restrictions: Mapping[str, Restriction], protocol: str) -> None:
        """Makes a rule for each restricted group of calls, such as "inference".

        Args:
          restrictions: maps the name of a group to the header that its calls need, and to the header's value.
          protocol: "http" or "grpc". Over gRPC, ``triton-grpc-protocol-`` stands before the name of each header.
        """
        what, prefix = _WORDS[protocol]
        self._rules = {
            group: Rule(
                (prefix + restriction.key).encode(),
                restriction.value.encode(),
                f"This {what} is restricted, expecting header '{prefix}{restriction.key}'",
            )
            for group, restriction in restrictions.items()
        }

    def rule(self, call: str) -> Rule | None:
        """Returns the rule for a call, or None if everybody may make it. Raises KeyError if no call has that name."""
        return self._rules.get(CALLS[call])
