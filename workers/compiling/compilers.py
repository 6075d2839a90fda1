"""The worker's side of its compile processes: starts, asks and kills them.

    thread: compile ─▶ a process that is free, started if there is none ─▶ executable
                                  │ killed, crashed, out of memory
                                  └─▶ CompilerDied: that program's load fails; the next one gets a new process

A process ends by itself when it had no work for a while, and with its worker. It is killed when nobody wants the program that it
compiles any more. Other programs do not wait for one that takes very long: another process is started for them.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections import deque
from multiprocessing import Pipe

from tensord.shm import child_process
from tensord.shm.record import encoder
from tensord.workers.compiling.records import FROM_PROCESS, Compile, Compiled, CompileRefused
from tensord.workers.threads.cancellation import Cancellation
from tensord.workers.threads.turns import Turns


class CompilerDied(Exception):
    """Raised if a compile process ended while it compiled a program; the text says how it ended."""


class Compilers:
    """Compiles programs in up to ``count`` processes. Any number of threads may use it; threads beyond ``count`` wait."""

    def __init__(self, count: int, long_seconds: float = 0.0) -> None:
        """Sets the limits of compile processes; starts none yet.

        ``count``: how many programs are compiled at a time.
        ``long_seconds``: a program that compiles for longer does not count towards ``count`` (``Turns``); 0: all count.
        """
        self.count = count
        self._turns = Turns(count, long_seconds)
        # The process that was used last is taken first, so that the others become idle and end.
        self._free: deque[_Process] = deque()

    def compile(self, asked: Compile, cancellation: Cancellation) -> Compiled | CompileRefused:
        """Compiles a program in a compile process. Returns the executable, or the compiler's error.

        Raises: CompilerDied: the process ended meanwhile.  Cancelled: nobody wants the program.  OSError: no process could be
        started.
        """
        with self._turns.turn(cancellation):
            while True:
                process = self._taken()
                try:
                    with cancellation.interrupting(process.kill):
                        answer = process.compile(asked)
                except CompilerDied:
                    cancellation.check()
                    raise
                # None: the process had ended because it was idle too long; the next one is tried.
                if answer is not None:
                    if not process.killed:
                        self._free.append(process)
                    return answer

    def _taken(self) -> _Process:
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return _Process()

    def __repr__(self) -> str:
        return f"<Compilers up to {self.count}>"


class _Process:
    """A compile process of this worker, to which programs are sent through a pipe; used by one thread at a time."""

    def __init__(self) -> None:
        """Starts the process. Raises OSError if the system cannot start it."""
        ours, theirs = Pipe()
        try:
            with child_process.group_signals_held():
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
        #: Whether it was killed, and cannot be used again.
        self.killed = False
        # The process may end at any time, and is reaped then.
        threading.Thread(target=self._bury, name="compile process", daemon=True).start()

    def compile(self, asked: Compile) -> Compiled | CompileRefused | None:
        """Compiles a program in the process. Returns the executable or the compiler's error; None: the process was gone already.

        After None another process has to be asked: this one had no work for a while and ended before it got the program.

        Raises: CompilerDied: the process ended while it compiled.
        """
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

    def kill(self) -> None:
        """Kills the process, because nobody wants the program that it compiles; any thread may call this."""
        self.killed = True
        self._process.kill()

    def _bury(self) -> None:
        self._process.wait()
        with self._lock:
            self._connection.close()
