from collections.abc import Callable
from typing import Any

from shm.arrays import Array

MAX_TENSORS: int
MOST: int

#: run, the most requests it takes, and for each of its arguments the address of the first request's and the step to the next.
_Program = tuple[Callable[[], list[Array]], int, tuple[tuple[int, int], ...]]

class FastPath:
    def __init__(
        self, epoll_fd: int, look_ns: int, page: memoryview, desk: int, idle: int, executing: int, /
    ) -> None: ...
    def open(self, fd: int, peer: int, in_flight: dict[int, object], /) -> None: ...
    def close(self, fd: int, /) -> None: ...
    def learn(
        self,
        fd: int,
        form: int,
        batch: object,
        most_waiting: int,
        programs: tuple[_Program | None, ...],
        #: Which argument, byte size, address: 0 in the record.
        inputs: tuple[tuple[int, int, int], ...],
        #: Which result, start, step, byte size, address: 0 into the record.
        outputs: tuple[tuple[int, int, int, int, int], ...],
        answer_form: int,
        intact: Callable[[], None] | None,
        /,
    ) -> None: ...
    def forget(self) -> None: ...
    def forget_form(self, fd: int, form: int, /) -> None: ...
    def wait(
        self, timeout_ns: int, fast: bool, /
    ) -> tuple[list[tuple[int, int]], list[tuple[int, tuple[bytes, list[int], bool]]], list[tuple[int, bytes]]]: ...
    def figures(
        self,
    ) -> list[tuple[Any, int, int, int, int, tuple[int, int, int], tuple[int, int, int], int, int]]: ...
    def release(self) -> None: ...
