"""Finds deadlocks: nodes that wait for each other and for nobody else. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def is_stuck(node: N, waits_for: Callable[[N], Iterable[N]]) -> bool:
    """Returns whether a node is deadlocked: it and all nodes that it waits for, directly or through others, wait.

    Args:
      waits_for: returns the nodes of which any one would let the given node go on; empty: it can go on by itself.
    """
    visited, left = {node}, [node]
    while left:
        found = tuple(waits_for(left.pop()))
        if not found:
            return False
        left += [other for other in found if other not in visited]
        visited.update(found)
    return True
