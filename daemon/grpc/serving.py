"""What every connection of a gRPC front needs: the options, what answers which path, and what all connections share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tensord.config.options import COMPRESSION_LEVELS, Grpc
from tensord.daemon.control.tally import Seat
from tensord.daemon.front.access import Rule
from tensord.daemon.front.lingering_close import LingeringClose
from tensord.daemon.front.longest_idle import Guest, LongestIdle
from tensord.daemon.grpc.call import Call
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.submit.accounts import Accounts


class Client(Guest, Protocol):
    """A connection, as its server sees it."""

    def check(self, now: float) -> None:
        """Looks at its deadlines. ``now``: loop time."""

    def announce_end(self) -> None:
        """No new streams, once the client can know of it."""

    def stop(self) -> None:
        """No new streams; those that are there end with the answers they are owed."""

    def abort(self) -> None:
        """Cuts it."""


@dataclass(slots=True)
class Serving:
    """What every connection of a front needs."""

    options: Grpc
    #: What answers a path.
    methods: dict[str, Callable[[Stream], Call]]
    #: Where this front's connections are counted, and the others' stand.
    seat: Seat
    #: What its clients hold.
    accounts: Accounts
    #: What a path needs to be let in; those that are not here need nothing.
    rules: dict[str, Rule] = field(default_factory=dict)
    connections: set[Client] = field(default_factory=set)
    #: Bytes of incomplete messages, all connections together.
    collected: int = 0
    #: Who goes when there are too many of them.
    longest_idle: LongestIdle = field(init=False)
    #: Those that are over, until their clients have closed as well.
    lingering: LingeringClose = field(init=False)
    max_message: int = field(init=False)
    max_collected: int = field(init=False)
    #: zlib level of answers for clients that accept gzip; 0: none.
    compression: int = field(init=False)
    stopping: bool = False

    def __post_init__(self) -> None:
        self.longest_idle = LongestIdle(self.connections, self.options.max_connections)
        self.lingering = LingeringClose(self.options.min_rate)
        self.max_message = self.options.max_message_byte_size
        self.max_collected = max(self.options.max_receiving_byte_size, 2 * self.max_message)
        self.compression = COMPRESSION_LEVELS[self.options.response_compression]
