"""Starts processes whose imports are done: it forks them off one that has made them, which spares each up to a second.

pytest ── starts ──▶ the first process: has imported what daemons, fronts and workers import, and waits
   │                   └─ fork ─▶ one that ends at once
   └── becomes the parent of ───────── fork ─▶ python -m tensord serve …, from its first line on
                                                └─ fork ─▶ python -m workers …, the same way

Each has the arguments, environment, descriptors, folder and parent that it would have if it were started. Variables that are
read before a program's first line (by the loader, by JAX) are those of the first process: there is one for each set of them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
#: Variables that are read when a process begins, or something is imported.
_READ_EARLY = ("JAX", "LD_", "MALLOC", "OMP", "OPENBLAS", "PYTHON", "XLA")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Process:
    """A child of this process, with as much of subprocess.Popen as supervisors and tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status if the process has ended, else None."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the process and returns its exit status. Raises TimeoutExpired: it has not ended by then."""
        if self.returncode is None and timeout is not None:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(self.pid)
                try:
                    ended, _, _ = select.select([pidfd], [], [], timeout)
                finally:
                    os.close(pidfd)
                if not ended:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
        status = self._reap(0)
        assert status is not None
        return status

    def _reap(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:
                self.returncode = 0  # somebody else has waited for it: what subprocess says then
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing if the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process if it has not ended; ``wait`` returns how it ended."""
        self.send_signal(signal.SIGKILL)


def early(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a program reads before its first line, so that they cannot be set later."""
    found = {name: value for name, value in environment.items() if name.startswith(_READ_EARLY)}
    # Where the packages are that every process finds anyway is no difference.
    folders = [folder for folder in found.pop("PYTHONPATH", "").split(os.pathsep) if folder not in ("", str(_ROOT))]
    return found | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})


def firsts() -> dict[int, int]:
    """Returns the processes that others are forked off: process id -> the descriptor that leads to it. They end with this one."""
    return {first.pid: first.fileno() for first in _firsts.values()}


def start(
    words: Sequence[str],
    fds: Sequence[int] = (),
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path = _ROOT,
    new_session: bool = False,
    given: int | None = None,
    output: int | None = 1,
    errors: int = 2,
) -> Process:
    """Starts ``python -m WORDS`` by a fork, or ``python -c`` if that is the first word.

    It gets these descriptors under the numbers that they have here.

    Args:
      given: the descriptor of its standard input; None: it has none.
      output, errors: the descriptors of its outputs, by default those of this process. Without ``output`` that is dropped.
    """
    environment = dict(os.environ if environment is None else environment)
    null = os.open(os.devnull, os.O_RDWR)
    try:
        order = {
            "words": list(words),
            "environment": environment,
            "cwd": str(cwd),
            "new_session": new_session,
            "fds": [0, 1, 2, *fds],
        }
        standard = [null if given is None else given, null if output is None else output, errors]
        # Threads may ask at the same time: there is one first process for them, and who adopts is the whole process.
        with _one_at_a_time:
            pid = _first_for(environment).fork(order, [*standard, *fds])
    finally:
        os.close(null)
    return Process(pid)


def is_forked(pid: int) -> bool:
    """Returns whether a process was forked off a first process, by its command line (``first_process._rename``)."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"//")


def run(words: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m WORDS`` to its end by a fork; returns its exit status and outputs."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start(words, environment=environment, output=output.fileno(), errors=errors.fileno())
        try:
            status = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, status, output.read(), errors.read())


def run_script(script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Runs ``python -c SCRIPT ARGUMENTS``, which has to succeed, by a fork; returns its output.

    For scripts that import JAX, where it is not the import that is tested.
    """
    done = run(["-c", script, *arguments], environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


class _First:
    """The side of pytest of a process that others are forked off."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        others = {name: value for name, value in os.environ.items() if not name.startswith(_READ_EARLY)}
        with theirs:
            self._process = subprocess.Popen(
                # Its children write theirs over the last word.
                [sys.executable, "-P", "-m", "tests.first_process", str(theirs.fileno()), "-" * 2048],
                cwd=_ROOT,
                env={
                    **others,
                    **variables,
                    "PYTHONPATH": os.pathsep.join([str(_ROOT), variables.get("PYTHONPATH", "")]),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest, which ends its processes
            )
        atexit.register(self.end)

    def fork(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        with _adopting():
            socket.send_fds(self._orders, [json.dumps(order).encode()], fds)
            answer = self._orders.recv(64)
        assert answer, "the first process has ended"
        return int(answer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._orders.fileno()

    def end(self) -> None:
        self._orders.close()
        self._process.wait()


_one_at_a_time = threading.Lock()
#: By those variables that they began with.
_firsts: dict[frozenset[tuple[str, str]], _First] = {}


def _first_for(environment: Mapping[str, str]) -> _First:
    variables = early(environment)
    key = frozenset(variables.items())
    if key not in _firsts:
        _firsts[key] = _First(variables)
    return _firsts[key]


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of descendants whose own parent ends within the block."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0
    try:
        yield
    finally:
        assert prctl(_PR_SET_CHILD_SUBREAPER, 0) == 0
