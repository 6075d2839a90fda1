"""Who waits for whom: whether anything can still go on. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def is_stuck(node: N, waits_for: Callable[[N], Iterable[N]]) -> bool:
    """Whether it waits for itself, or for others that do, and for nobody else.

    Args:
      waits_for: of a node those of which any one is enough for it to go on; none: it goes on by itself.
    """
    seen, left = {node}, [node]
    while left:
        found = tuple(waits_for(left.pop()))
        if not found:
            return False
        left += [other for other in found if other not in seen]
        seen.update(found)
    return True
