"""Parses and writes lists of processor cores in Linux's notation, such as ``0-3,8``."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: The largest core number that the kernel knows.
MAX_CORE = 8191
_PART = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", re.ASCII)


def parse(text: str) -> tuple[int, ...]:
    """Returns the core numbers that ``text`` lists, such as ``0-3,8``, in ascending order.

    Raises ValueError if the text is malformed.
    """
    cores: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not first <= last <= MAX_CORE:
            raise ValueError(f"expected cores such as '0-3,8', at most {MAX_CORE}, given {text[:100]!r}")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))


def describe(cores: Iterable[int]) -> str:
    """Returns the shortest text that lists ``cores``, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
