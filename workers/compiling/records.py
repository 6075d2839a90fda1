"""What a worker and its compile processes say to each other, each record in a message of its own.

worker    Compile ─▶
          ◀─ Compiled | Refused        one answer for each, in their order
"""

from __future__ import annotations

import msgspec

from tensord.shm.record import Record


class Compile(Record, frozen=True):
    """One program."""

    #: MLIR bytecode of a module of StableHLO.
    module: bytes
    #: XLA's CompileOptionsProto.
    options: bytes
    #: Of the client that will run it: the threads it computes with, its devices, and which of these the program is for.
    threads: int
    device_count: int
    devices: tuple[int, ...]


class Compiled(Record, frozen=True):
    """As XLA serialises it."""

    executable: bytes


class Refused(Record, frozen=True):
    """The compiler raised."""

    reason: str


TO_PROCESS = msgspec.msgpack.Decoder(Compile)
FROM_PROCESS: msgspec.msgpack.Decoder[Compiled | Refused] = msgspec.msgpack.Decoder(Compiled | Refused)
