"""Which of several names belongs to an identity: the one of the highest rank. Pure, and the same in every process.

A name that comes or goes changes what belongs to itself, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def choose(identity: object, names: Iterable[str]) -> str:
    """One of at least one. ``identity``: by its ``repr``."""
    key = blake2b(repr(identity).encode("utf-8", "surrogatepass")).digest()
    return max(names, key=lambda name: blake2b(name.encode(), key=key).digest())
