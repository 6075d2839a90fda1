from collections.abc import Callable, Iterator, Sized
from typing import Any

from tensord_client.common.results import Answer, Array

SOURCE: int

def unpack_from(content: bytes | bytearray | memoryview, at: int, end: int) -> tuple[Any, int] | None: ...
def request(request_id: int, prepared: bytes, contents: list[bytes], own: bytes) -> bytes: ...
def small_inputs(
    inputs: dict[str, Array], limit: int, room: int, ndarray: type[Array]
) -> tuple[tuple[Any, ...], list[bytes]] | None: ...
def arrays(
    answer: dict[str, Array],
    outputs: tuple[tuple[str, tuple[int, ...], Any, int], ...],
    contents: list[Any],
    ndarray: type[Array],
) -> bool: ...

class Spin:
    def __init__(self, limit_ns: int) -> None: ...
    def before(self, fd: int) -> None: ...
    def after(self) -> None: ...
    def begin(self, now_ns: int) -> int: ...
    def end(self, now_ns: int) -> None: ...

class Exchange:
    def __init__(
        self,
        *,
        datagram: bytearray,
        id_at: int,
        deadline_at: int,
        received: bytearray,
        head: bytes,
        tail: bytes,
        tail_at: int,
        outputs: Answer,
        lane: Any,
        socket: Any,
        spin: Spin,
        fd: int,
        in_flight: dict[int, Any],
        backlog: Sized,
        releases: Sized,
        followers: Sized,
        ids: Iterator[int],
        acquire: Callable[[bool], bool],
        release: Callable[[], None],
        locked: Callable[[], bool],
        memory: Any,
        models: dict[Any, Any],
        model_key: Any,
        model: Any,
        epoch: int,
        learned: int,
        until: float,
    ) -> None: ...
    def ask(
        self, call: Any, until: float | None
    ) -> Answer | tuple[int, tuple[int, list[tuple[int, int, bytes]], int] | None] | None: ...
