"""Runs a program of ours beside a measurement, such as a client that makes load, and ends it when the block ends.

It has a session of its own, so Ctrl-C reaches only the measurement, which then ends every program that it has started: with
SIGTERM, upon which a helper leaves its own blocks (``leaves_blocks``) and removes what it has put into shared memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = Path(__file__).parent.parent
#: Seconds that one which was told to end may take: a machine may be busy.
_PATIENCE = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def helper(module: str, *words: str, python: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    """Runs ``python -m MODULE WORDS`` with pipes until the block ends, in whatever way it ends."""
    process = subprocess.Popen(
        [python, "-m", module, *words],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process that leads a session: sends SIGTERM and waits, then kills what is left of its process group."""
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reports(processes: Iterable[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Closes the standard input of all processes and returns the JSON object of each. Raises SystemExit: one failed."""
    running = list(processes)
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
    return [report(process) for process in running]


def line(process: subprocess.Popen[str]) -> str:
    """Waits for a process to say something, and returns the line. Raises SystemExit: it has ended."""
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said:
        raise SystemExit(f"{process.args} ended with {process.wait()}")
    return said


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for a process to end and returns the JSON object in its last line. Raises SystemExit: it failed."""
    assert process.stdout is not None
    text = process.stdout.read()
    if process.wait() or not text:
        raise SystemExit(f"{process.args} ended with {process.returncode} and said {text[-200:]!r}")
    said = json.loads(text.splitlines()[-1])
    assert isinstance(said, dict)
    return said


@contextlib.contextmanager
def leaves_blocks() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit within the block, so that the program cleans up. For the main thread only."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def object_name() -> str:
    """Returns a new name for a file in shared memory, with this process's id in it."""
    return f"tensord-bench-{os.getpid()}-{uuid.uuid4().hex}"
