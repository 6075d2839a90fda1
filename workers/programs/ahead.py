"""Makes programs in several threads at a time, and yields them in their order."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")


def ahead(make: Callable[[S], tuple[T, bool]], wanted: Iterable[S], threads: int) -> Iterator[tuple[T, bool]]:
    """Calls ``make`` for each wanted program in up to ``threads`` threads, and yields its results in the order of ``wanted``.

    Raises what a call of ``make`` raised.

    The first program is made in the caller's thread, before any other. If it did not have to be compiled, the others probably do
    not have to be either, and to make them one after the other is fastest. Then, and with one thread, each program is made only
    when the caller asks for it.

    Args:
      make: makes a program, or takes it from the cache; returns it, and whether it had to be compiled.
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
