"""Parses restrictions of groups of calls, ``GROUP[,GROUP...]:KEY=VALUE``: a header and its value open a group.

Source: Triton's --http-restricted-api and --grpc-restricted-protocol; the groups have its names.
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
    """The header that opens a group."""

    #: The header's name in lower case.
    key: str
    value: str = field(repr=False)


def parse(entries: Iterable[str]) -> dict[str, Restriction]:
    """Returns the restriction of each group; groups that are not in it are open to everybody.

    An entry without a colon belongs to the next one: that is what becomes of a list of groups in a comma-separated variable.
    Raises ValueError: a sentence about the first entry that is wrong, without the value, which is a secret.
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
