"""Makes programs several at a time, and yields them in their order."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def ahead(make: Callable[[S], tuple[T, bool]], wanted: Iterable[S], threads: int) -> Iterator[tuple[T, bool]]:
    """Yields ``make``'s result for each, in order; up to ``threads`` are under way. Raises what one of them raised.

    The first one is made alone, in the caller's thread. If it did not have to be compiled, as ``make`` says beside it, the
    others most likely have not either, and one after the other is quickest. Then, and with one thread, nothing is begun before
    it is asked for.
    """
    rest = iter(wanted)
    for first in rest:
        made = make(first)
        yield made
        if threads < 2 or not made[1]:
            yield from map(make, rest)
            return
        break
    under_way: collections.deque[concurrent.futures.Future[tuple[T, bool]]] = collections.deque()
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
