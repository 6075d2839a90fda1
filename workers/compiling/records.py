"""The messages between a worker and its compile processes: a program to compile, and the executable or error for it.

worker    Compile ─▶
          ◀─ Compiled | CompileRefused        one answer for each, in their order
"""

from __future__ import annotations

import msgspec

from tensord.shm.record import Record


class Compile(Record, frozen=True):
    """Asks a compile process to compile one program."""

    #: MLIR bytecode of a module of StableHLO.
    module: bytes
    #: XLA's CompileOptionsProto.
    options: bytes
    #: The client that will run the program: its threads, its devices, and which of these the program is for.
    threads: int
    device_count: int
    devices: tuple[int, ...]


class Compiled(Record, frozen=True):
    """Answers a Compile record with the executable, as XLA serialises it."""

    executable: bytes


class CompileRefused(Record, frozen=True):
    """Answers a Compile record with the error that the compiler raised."""

    reason: str


TO_PROCESS = msgspec.msgpack.Decoder(Compile)
FROM_PROCESS: msgspec.msgpack.Decoder[Compiled | CompileRefused] = msgspec.msgpack.Decoder(Compiled | CompileRefused)
