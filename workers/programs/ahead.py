"""Programs made several at a time, and taken in their order."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def ahead(make: Callable[[S], T], wanted: Iterable[S], threads: int) -> Iterator[T]:
    """What ``make`` gives for each, in their order; up to ``threads`` are under way. Raises what one of them raised.

    With one thread that is the caller's, and nothing is begun before it is asked for.
    """
    if threads < 2:
        yield from map(make, wanted)
        return
    rest = iter(wanted)
    under_way: collections.deque[concurrent.futures.Future[T]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(threads, "making programs") as executor:
        try:
            for one in rest:
                under_way.append(executor.submit(make, one))
                if len(under_way) == threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
