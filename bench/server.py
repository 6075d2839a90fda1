"""Runs a server that is to be measured, and reads its statistics and the processor time it has used."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from bench.helper import end, leaves_blocks

ROOT = Path(__file__).parent.parent
#: Seconds in which a server has to be ready, and how many lines of its log are told if it is not.
_PATIENCE = 300.0
_LINES = 12


@contextlib.contextmanager
def serving(
    command: Sequence[str], address: str, log: Path, cwd: Path = ROOT, patience: float = _PATIENCE
) -> Iterator[int]:
    """Runs a server in a folder until the block ends; yields its process id once it is ready.

    Raises SystemExit: it ended, or was not ready after ``patience`` seconds, with the last lines of its log; or another process
    already listens at the address and would be measured in its place.
    """
    host, port = address.rsplit(":", 1)
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port)), 5):
        raise SystemExit(f"{command[0]} cannot serve on {address}: somebody else does")
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(leaves_blocks())
        with log_file(log) as output:
            process = subprocess.Popen(command, cwd=cwd, stdout=output, stderr=output, start_new_session=True)
        # The server ends its own processes: only so it removes what it shared with them.
        stack.callback(end, process)
        until = time.monotonic() + patience
        while not ready(address):
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} exited with {process.returncode}; see {log}{_end_of(log)}")
            if time.monotonic() > until:
                # It may serve, but not a model that does not load.
                raise SystemExit(f"{command[0]} is not ready after {patience:.0f} s; see {log}{_end_of(log)}")
            time.sleep(0.1)
        yield process.pid


def log_file(path: Path) -> BinaryIO:
    """Opens and empties a log file. Raises SystemExit: another user has put a file or a link there, as in /tmp."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise SystemExit(f"{path} is somebody else's: say where the log goes")
    os.ftruncate(fd, 0)
    return os.fdopen(fd, "wb")


def _end_of(log: Path) -> str:
    """Returns the last lines of the log, indented."""
    return "".join(f"\n    {line}" for line in log.read_text(errors="replace").splitlines()[-_LINES:])


def ready(address: str) -> bool:
    """Returns whether a server answers and says that it is ready."""
    try:
        with urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):  # a busy machine, too
        return False


def answered(address: str) -> int:
    """Returns how many inference requests a server has answered rightly since its start."""
    return sum(model["inference_stats"]["success"]["count"] for model in statistics(address))


def copied(address: str, model: str) -> int:
    """Returns how many bytes of tensors a server has copied for a model since its start, by its own statistics."""
    return sum(int(version["copied_byte_size"]) for version in statistics(address, f"/{model}"))


def statistics(address: str, model: str = "") -> Any:
    """Returns the statistics that a server has of each model version: of all, or of those of "/MODEL"."""
    with urllib.request.urlopen(f"http://{address}/v2/models{model}/stats", timeout=30) as answer:
        return json.load(answer)["model_stats"]


def children(pid: int) -> dict[int, str]:
    """Returns the direct children of a process: process id -> the module that it runs, or its command's name."""
    found = {}
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            words = child.cmdline() or [""]
            module = words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
            # Older checkouts, which are measured too, have the packages by those names alone.
            found[child.pid] = module.removeprefix("tensord.")
    return found


def used_us(server: int) -> dict[str, float]:
    """Returns the processor time of a process and its children in microseconds, by their modules.

    It is that of the threads that there are, in user and kernel mode, as the scheduler counts it: not in ticks of 10 ms.
    """
    found: dict[str, float] = {}
    for pid, name in {server: "supervisor", **children(server)}.items():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[name] = found.get(name, 0.0) + int((thread / "schedstat").read_text().split()[0]) / 1e3
    return found
