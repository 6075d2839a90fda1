"""Finds deadlocks: nodes that wait for each other and for nobody else. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def is_stuck(node: N, waits_for: Callable[[N], Iterable[N]]) -> bool:
    """Returns whether a node waits for itself, or for others that do, and for nobody else.

    Args:
      waits_for: returns a node's alternatives: any one lets it go on; none: it goes on by itself.
    """
    visited, left = {node}, [node]
    while left:
        found = tuple(waits_for(left.pop()))
        if not found:
            return False
        left += [other for other in found if other not in visited]
        visited.update(found)
    return True
