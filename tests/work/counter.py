"""Counts what this process does while a counter runs: bytecodes and system calls of our code.

None of it depends on how fast a machine is or what else runs on it.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = Path(__file__).parent.parent.parent
#: Code that is counted; not what it calls in libraries, nor the tests.
ROOMS = tuple(f"{_ROOT / 'tensord' / room}/" for room in ("daemon", "shm", "workers", "config"))
#: Functions of the standard library that are system calls.
_SYSTEM_CALLS = {"send", "sendmsg", "sendto", "recv", "recv_into", "recvmsg", "recvmsg_into", "_accept", "sched_yield"}
_SYSTEM_CALLS |= {
    "memfd_create",
    "ftruncate",
    "posix_fallocate",
    "fcntl",
    "dup",
    "getpeername",
    "getsockname",
    "getsockopt",
    "setblocking",
    "setsockopt",
    "shutdown",
    "pread",
    "pwrite",
    "preadv",
    "pwritev",
}


class Work:
    """The counts of bytecodes and system calls."""

    def __init__(self) -> None:
        #: Bytecodes executed in our own modules.
        self.instructions = 0
        self.system_calls: Counter[str] = Counter()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts within the block. It may be entered again and again; the counts add up."""
        trace, profile = sys.gettrace(), sys.getprofile()
        sys.setprofile(self._profile)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(trace)
            sys.setprofile(profile)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ROOMS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.instructions += 1
        return self._step

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_call" or argument.__name__ not in _SYSTEM_CALLS or isinstance(argument.__self__, Coroutine):
            return
        # Some methods of sockets are functions of the standard library around those that call the system.
        caller = frame.f_back if frame.f_code.co_filename == socket.__file__ else frame
        if caller is not None and caller.f_code.co_filename.startswith(ROOMS):
            self.system_calls[argument.__name__] += 1


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Collects garbage, and none any more until the ``with`` block ends."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
