"""A worker's compile processes, from its side.

    thread: compile ─▶ a process that is free, started if there is none ─▶ executable
                                  │ killed, crashed, out of memory
                                  └─▶ CompilerDied: that program's load fails; the next one gets a new process

Each process ends by itself when nothing was asked of it for a while, and with its worker.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe

from tensord.shm.record import encoder
from tensord.workers.compiling.records import FROM_PROCESS, Compile, Compiled, Refused


class CompilerDied(Exception):
    """A process ended while it compiled; the text says how."""


class Compilers:
    """Up to ``count`` processes. Used by any number of threads; those beyond ``count`` wait."""

    def __init__(self, count: int) -> None:
        self.count = count
        # The one that was used last is taken first: the others may end.
        self._free: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)

    def compile(self, asked: Compile) -> Compiled | Refused:
        """Has it compiled. Raises CompilerDied; OSError: no process can be started."""
        process = self._free.get()
        try:
            while True:
                if process is None:
                    process = _Process()
                answer = process.compile(asked)
                if answer is not None:
                    return answer
                # It had nothing to do for too long.
                process = None
        except CompilerDied:
            process = None
            raise
        finally:
            self._free.put(process)

    def __repr__(self) -> str:
        return f"<Compilers up to {self.count}>"


class _Process:
    """One of them; used by one thread at a time."""

    def __init__(self) -> None:
        """Starts it. Raises OSError: there is no room for it."""
        ours, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                # -P: whatever lies in the working directory is not ours to import.
                [sys.executable, "-P", "-m", "tensord.workers.compiling", "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = ours
        self._lock = threading.Lock()
        # It ends when it likes.
        threading.Thread(target=self._bury, name="compile process", daemon=True).start()

    def compile(self, asked: Compile) -> Compiled | Refused | None:
        """None: it had ended before. Raises CompilerDied."""
        if self._process.poll() is not None:
            return None
        with self._lock, contextlib.suppress(EOFError, OSError):
            self._connection.send_bytes(encoder.encode(asked))
            return FROM_PROCESS.decode(self._connection.recv_bytes())
        if (status := self._process.wait()) == 0:
            return None
        with contextlib.suppress(ValueError):
            raise CompilerDied(f"was killed by {signal.Signals(-status).name}")
        raise CompilerDied(f"exited with status {status}")

    def _bury(self) -> None:
        self._process.wait()
        with self._lock:
            self._connection.close()
