"""Parses ``GROUP[,GROUP...]:KEY=VALUE``: a client must send the header ``KEY: VALUE`` to call the RPCs of a GROUP.

GROUP is a name such as "inference". Over gRPC, the header's name is ``triton-grpc-protocol-KEY``.
Source: Triton's options --http-restricted-api and --grpc-restricted-protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

GROUPS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
    # Ours: pushing, dropping and listing parameter sets.
    "parameters",
)
#: The characters that a header's name may have (RFC 9110, token).
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FORM = "expected GROUP[,GROUP...]:KEY=VALUE"


@dataclass(frozen=True, slots=True)
class Restriction:
    """A header, with name and value, that a client must send to call the RPCs of a restricted group."""

    #: The header's name in lower case.
    key: str
    value: str = field(repr=False)


def parse(entries: Iterable[str]) -> dict[str, Restriction]:
    """Parses entries ``GROUP[,GROUP...]:KEY=VALUE``. Returns the header that a client must send to each restricted group of RPCs.

    Each group is one of ``GROUPS``. A group that no entry names is open to everybody. An entry without ``:KEY=VALUE`` uses the
    KEY and VALUE of the next entry.

    Raises ValueError if an entry is wrong. The message has the first wrong entry, but never a VALUE, which is a secret.
    """
    found: dict[str, Restriction] = {}
    waiting: list[str] = []
    for entry in entries:
        names, colon, rule = entry.partition(":")
        waiting += names.split(",")
        if not colon:
            continue
        key, equals, value = rule.partition("=")
        if not (equals and value and _TOKEN.fullmatch(key)):
            raise ValueError(f"{_FORM}, given {names + colon + key + ('=...' if equals else '')!r}")
        for name in waiting:
            if name.strip() not in GROUPS:
                raise ValueError(f"unknown group {name.strip()!r}; there are {', '.join(GROUPS)}")
            if name.strip() in found:
                raise ValueError(f"group {name.strip()!r} is restricted twice")
            found[name.strip()] = Restriction(key.lower(), value)
        waiting = []
    if waiting:
        raise ValueError(f"{_FORM}, given {','.join(waiting)!r}")
    return found


def without_values(entries: Iterable[str]) -> tuple[str, ...]:
    """Returns ``entries``, each ``GROUP[,GROUP...]:KEY=VALUE``, with ``...`` in place of VALUE, which is a secret."""
    return tuple(re.sub(r"(:[^=]*=).*", r"\1...", entry, flags=re.DOTALL) for entry in entries)
