from array import array
from collections.abc import Callable, Sequence
from typing import Any

from tensord.shm.arrays import Array
from tensord.shm.spin import Spin
from tensord.workers.parameters.parameter_set import ParameterSet

SOURCES: str
MAX_SEQUENCE_ID: int
MAX_SET_NAME: int
MAIN_SET: str
MAX_DATAGRAM: int
MAX_FDS: int
TIMING: int
TIMESTAMPS: int
INLINE_KIND: int
MAX_NUMBERS: int
PAGE_STATE: int
PAGE_SINCE: int
PAGE_BEAT: int
SLOT_MODEL: int
SLOT_SINCE: int
MAX_TENSORS: int
MAX_ROWS: int
MAX_OFFERS: int
PROTOCOLS: int
DURATION_KINDS: int
MAX_BUCKETS: int

def answers(number: int, request_ids: list[int], sizes: tuple[int, ...], contents: Array | bytes) -> list[bytes]: ...

#: What runs it (called with a parameter set, with that of each row, or with nothing: all rows have main), its rows, whether those
#: that nobody fills become zero, and of each argument the address and the step of a row.
Program = tuple[Callable[..., Sequence[Array | bytes]], int, bool, tuple[tuple[int, int], ...]]
#: Correlation id, START and END of each request.
Asked = list[tuple[int | str, bool, bool]]
#: Lane, id and moment of arrival of each request.
Described = list[tuple[int, int, int]]
#: The functions for requests of sequences: one says how many of the first ones run now; one answers those whose run failed, with
#: the reason.
Sequences = tuple[Callable[[Asked], int], Callable[[Described, Exception | None], None]]
#: Whose requests they are, how many of them may wait, what a program has to do for each of its rows (as a part of an iteration of
#: the loop), how many ns they wait for others to share their run and how many rows do not wait for more (0: none waits), whether
#: a run applies the model to each by itself, whether requests of several parameter sets may share a run, all programs, which of
#: them by the number of rows that wait: -1 for none; what is asked of sequences; and the histograms of its model version, counts
#: and bounds (``tensord.shm.durations``).
Batch = tuple[
    object,
    int,
    int,
    float,
    int,
    int,
    bool,
    bool,
    tuple[Program, ...],
    tuple[int, ...],
    Sequences | None,
    tuple["array[int]", "array[int]"],
]

class FastPath:
    def __init__(
        self,
        epoll_fd: int,
        spin: Spin | None,
        page: memoryview,
        slot: int,
        idle: int,
        executing: int,
        #: Called when the answers of sequences have left.
        left: Callable[[], None],
        /,
    ) -> None: ...
    def open(
        self,
        fd: int,
        peer: int,
        in_flight: dict[int, Any],
        take_back: Callable[[bytes], object],
        #: Requests in flight on a client's lane at most; 0: a front's.
        most: int,
        #: The protocol by which its clients ask: a place in ``durations.PROTOCOLS``.
        protocol: int,
        /,
    ) -> None: ...
    def close(self, fd: int, /) -> None: ...
    def learn(
        self,
        fd: int,
        number: int,
        batch: Batch,
        rows: int,
        #: The number of the argument (``alone``: it does not count), byte size, address: 0 in the record.
        inputs: tuple[tuple[int, int, int], ...],
        #: The number of the result (-1: in the lease of ``alone``), start, step, byte size, address: 0 into the record.
        outputs: tuple[tuple[int, int, int, int, int], ...],
        answer_number: int,
        intact: Callable[[], None] | None,
        #: The encoded bytes that follow the moments in timelines; None: traced requests are Python's.
        traced: bytes | None,
        #: The sets that requests may name, by name; None: requests that name one are Python's.
        sets: dict[str, ParameterSet] | None,
        #: Runs each request by itself. Called with the inputs, and the parameter set if the request names one.
        alone: Callable[..., tuple[int, int, int, list[Array]] | None] | None = None,
        /,
    ) -> None: ...
    def forget(self) -> None: ...
    def forget_number(self, fd: int, number: int, /) -> None: ...
    def wait(
        self, timeout_ns: int, fast: bool, sleeps: bool = ..., /
    ) -> tuple[list[tuple[int, int]], list[tuple[int, tuple[bytes, list[int], int]]], list[tuple[int, bytes]]]: ...
    def figures(self) -> list[tuple[Any, ...]]: ...
    def lane_requests(self) -> int: ...
    def let_pass(self, most: int, joins: bool) -> None: ...
    def release(self) -> None: ...

def redirect_allocations(folder: str, /) -> bool: ...
def watch_allocations() -> None: ...
def watched_allocations() -> list[tuple[int, int]]: ...
def offer(byte_size: int, skip: int, address: int, /) -> None: ...
def withdraw_offers() -> None: ...
def holds(address: int, /) -> bool: ...
