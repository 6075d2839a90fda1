"""Holds what all connections of a gRPC front share: the options, the code that answers each path, limits and counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensord.config.options import COMPRESSION_LEVELS, Grpc
from tensord.daemon.control.shared_counters import FrontCounters
from tensord.daemon.front.access import Rule
from tensord.daemon.front.answered import Answered
from tensord.daemon.front.lingering_close import LingeringClose
from tensord.daemon.front.longest_idle import LongestIdle
from tensord.daemon.grpc.call import Call
from tensord.daemon.submit.accounts import Accounts
from tensord.shm.running_time import RunningTime

if TYPE_CHECKING:
    from tensord.daemon.grpc.connection import Http2Connection
    from tensord.daemon.grpc.stream import Stream
    from tensord.daemon.submit.submitter import Submitter


#: The most bytes of one read, and of one that is expected to begin a large message.
_READ_BYTE_SIZE = 256 << 10
_FIRST_BYTE_SIZE = 16 << 10


@dataclass(slots=True)
class GrpcServing:
    """Holds what all connections of a gRPC front share."""

    options: Grpc
    #: The method that answers each path.
    methods: dict[str, Callable[[Stream], Call]]
    #: Where this front's connections are counted, and the others' stand.
    counters: FrontCounters
    #: The accounts of the memory that its clients hold.
    accounts: Accounts
    #: Counts what is answered.
    answered: Answered
    #: The rule by which a client may call a path; paths that are not here are open to all.
    rules: dict[str, Rule] = field(default_factory=dict)
    #: Tells the load; None: there is nothing to be told.
    submitter: Submitter | None = None
    connections: dict[Http2Connection, None] = field(default_factory=dict)
    #: The time by which clients are late.
    clock: RunningTime = field(default_factory=RunningTime)
    #: Bytes of incomplete messages, all connections together.
    collected: int = 0
    #: Chooses the connection that is closed when there are too many.
    longest_idle: LongestIdle = field(init=False)
    #: The connections that are over, until their clients have closed as well.
    lingering: LingeringClose = field(init=False)
    max_message: int = field(init=False)
    max_collected: int = field(init=False)
    #: zlib level of answers for clients that accept gzip; 0: none.
    compression: int = field(init=False)
    #: The memory that all connections read into, and its first pages. What was read is copied or parsed before the next read.
    read_buffer: memoryview = field(init=False)
    first_pages: memoryview = field(init=False)
    stopping: bool = False

    def __post_init__(self) -> None:
        self.longest_idle = LongestIdle(self.connections, self.options.max_connections)
        self.lingering = LingeringClose(self.options.min_rate, self.clock)
        self.max_message = self.options.max_message_byte_size
        self.max_collected = max(self.options.max_receiving_byte_size, 2 * self.max_message)
        self.read_buffer = memoryview(bytearray(_READ_BYTE_SIZE))
        self.first_pages = self.read_buffer[:_FIRST_BYTE_SIZE]
        self.compression = COMPRESSION_LEVELS[self.options.response_compression]
