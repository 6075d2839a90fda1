"""Who is measured: this checkout, another one of ours, this one once more, a real Triton."""

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
    """One under measurement; it runs inside the block.

    Args:
      run: starts it, and yields its process id; given how many times it was started before. None: somebody else started it.
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
        """Starts it again where it has died. Returns whether it had."""
        if self.pid is None or _lives(self.pid):
            return False
        self._running.close()
        self.__enter__()
        return True

    def address(self, protocol: str) -> str:
        """Of the protocol as pools name it."""
        return self.http if protocol == "http" else self.grpc

    def used_us(self) -> float | None:
        """Processor time of all its processes since they started."""
        if self.pid is None:
            return None
        usages = [Usage.of(pid) for pid in (self.pid, *children(self.pid))]
        return sum(usage.user_us + usage.kernel_us for usage in usages)

    def megabytes(self) -> float | None:
        """Memory of all its processes; what several share counts once."""
        return None if self.pid is None else proportional(self.pid) / 1e6


def program(checkout: Path) -> list[str]:
    """The daemon of a checkout, to be run there, with its own Python if it has one."""
    python = checkout / ".venv" / "bin" / "python"
    # Older ones have no package of that name.
    module = "tensord" if (checkout / "tensord" / "__main__.py").exists() else "daemon"
    return [str(python) if python.exists() else sys.executable, "-m", module]


def _lives(pid: int) -> bool:
    """Whether that child of ours has not ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"


def ours(name: str, checkout: Path, logs: Path) -> Server:
    """A daemon of a checkout; the models and the configuration are always ours."""
    port = _PORTS[name]
    http, grpc = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    command = [*program(checkout), "serve", "--config", str(ROOT / "bench" / "serve.toml")]
    command += [f"--model-repository={ROOT / 'bench' / 'models'}"]
    command += [f"--http-port={port}", f"--grpc-port={port + 1}", "--allow-metrics=false"]
    return Server(name, http, grpc, lambda n: serving(command, http, _log(logs, f"bench-vary-{name}", n), cwd=checkout))


def peer(where: str, logs: Path) -> Server:
    """A real Triton: in a folder with setup.sh and triton.sh, which is started, or HTTP,GRPC: addresses of one that runs."""
    if ":" in where:
        http, _, grpc = where.partition(",")
        return Server(PEER, http, grpc)
    folder = Path(where).resolve()
    subprocess.run([folder / "setup.sh"], check=True, stdout=subprocess.DEVNULL)
    command = [str(folder / "triton.sh"), str(folder / "models")]
    return Server(PEER, _PEER_HTTP, _PEER_GRPC, lambda n: serving(command, _PEER_HTTP, _log(logs, "bench-peer", n)))


def _log(logs: Path, name: str, start: int) -> Path:
    """Each start has a file of its own: why one died stands in the one before."""
    return logs / f"{name}{f'-{start + 1}' if start else ''}.log"
