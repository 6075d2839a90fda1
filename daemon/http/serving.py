"""What every inference request of a front needs: its options, its table, its submitter, and the operator's rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from config.options import COMPRESSION_LEVELS, Options
from daemon.access import Rule
from daemon.forwarding import Forwarding
from daemon.http.conversions import Conversions
from daemon.http.request_codec import Recognised
from daemon.longest_idle import LongestIdle
from daemon.model_table import ModelTable
from daemon.submit import Submitter
from daemon.tally import Seat
from daemon.tracer import Tracer


@dataclass(slots=True)
class Serving:
    """One per front; its requests and their connections share it."""

    options: Options
    table: ModelTable
    submitter: Submitter
    #: Where this front's connections are counted, and the others' stand.
    seat: Seat
    recognised: Recognised = field(default_factory=Recognised)
    #: What an inference request needs to be let in; None: nothing.
    infer_rule: Rule | None = None
    #: Headers that become parameters; None: none.
    forwarding: Forwarding | None = None
    tracer: Tracer | None = None
    conversions: Conversions = field(default_factory=Conversions)
    #: Bytes of all bodies that are collected in ordinary memory.
    collected_byte_size: int = 0
    #: Who goes when there are too many connections.
    longest_idle: LongestIdle = field(default_factory=lambda: LongestIdle((), 0))
    #: Every answer is the last of its connection.
    stopping: bool = False
    #: And a request that begins now is not taken any more.
    closed: bool = False
    #: zlib level of answers for clients that accept gzip or deflate; 0: none.
    compression: int = field(init=False)

    def __post_init__(self) -> None:
        self.compression = COMPRESSION_LEVELS[self.options.http.response_compression]
