"""Starts the servers that are measured: this checkout, another one of ours, this one once more, a real Triton."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from bench.footprint import proportional
from bench.server import ROOT, Usage, children, serving

OURS, OTHER, CONTROL, PEER = "ours", "other", "control", "peer"
_PORTS = {OURS: 18180, OTHER: 18190, CONTROL: 18170}
#: Where triton.sh serves.
_PEER_HTTP, _PEER_GRPC = "127.0.0.1:18000", "127.0.0.1:18001"


class Server:
    """One server that is measured; it runs within the block.

    Args:
      run: starts the server and yields its process id; called with how many times it was started before. None: it runs already.
    """

    def __init__(
        self, name: str, http: str, grpc: str, run: Callable[[int], AbstractContextManager[int]] | None = None
    ) -> None:
        self.name = name
        self.http = http
        self.grpc = grpc
        self.pid: int | None = None
        self._run = run
        self._starts = itertools.count()
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Server:
        if self._run is not None:
            self.pid = self._running.enter_context(self._run(next(self._starts)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.close()

    def revive(self) -> bool:
        """Starts the server again if it has died. Returns whether it had."""
        if self.pid is None or _lives(self.pid):
            return False
        self._running.close()
        self.__enter__()
        return True

    def address(self, protocol: str) -> str:
        """Returns the address for a protocol, named as in a pool."""
        return self.http if protocol == "http" else self.grpc

    def used_us(self) -> float | None:
        """Returns the processor time of all its processes since they started, in microseconds; None: not known."""
        if self.pid is None:
            return None
        usages = [Usage.of(pid) for pid in (self.pid, *children(self.pid))]
        return sum(usage.user_us + usage.kernel_us for usage in usages)

    def megabytes(self) -> float | None:
        """Returns the memory of all its processes in MB, what several share counted once; None: not known."""
        return None if self.pid is None else proportional(self.pid) / 1e6


def program(checkout: Path) -> list[str]:
    """Returns the command of a checkout's daemon, to be run in that checkout, with its own Python if it has one."""
    python = checkout / ".venv" / "bin" / "python"
    # Older ones have no package of that name.
    module = "tensord" if (checkout / "tensord" / "__main__.py").exists() else "daemon"
    return [str(python) if python.exists() else sys.executable, "-m", module]


def _lives(pid: int) -> bool:
    """Returns whether a child process of ours is still running."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"


def ours(name: str, checkout: Path, logs: Path) -> Server:
    """Describes a daemon of a checkout. The models and the configuration are those of this checkout."""
    port = _PORTS[name]
    http, grpc = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    command = [*program(checkout), "serve", "--config", str(ROOT / "bench" / "serve.toml")]
    command += [f"--model-repository={ROOT / 'bench' / 'models'}"]
    command += [f"--http-port={port}", f"--grpc-port={port + 1}", "--allow-metrics=false"]
    return Server(name, http, grpc, lambda n: serving(command, http, _log(logs, f"bench-vary-{name}", n), cwd=checkout))


def peer(where: str, logs: Path) -> Server:
    """Describes a real Triton.

    ``where``: a folder with setup.sh and triton.sh, which is started; or HTTP,GRPC, the addresses of one that runs.
    """
    if ":" in where:
        http, _, grpc = where.partition(",")
        return Server(PEER, http, grpc)
    folder = Path(where).resolve()
    subprocess.run([folder / "setup.sh"], check=True, stdout=subprocess.DEVNULL)
    command = [str(folder / "triton.sh"), str(folder / "models")]
    return Server(PEER, _PEER_HTTP, _PEER_GRPC, lambda n: serving(command, _PEER_HTTP, _log(logs, "bench-peer", n)))


def _log(logs: Path, name: str, start: int) -> Path:
    """Returns the path of a start's log. Each start has one of its own, so that the one before still says why the server died."""
    return logs / f"{name}{f'-{start + 1}' if start else ''}.log"
