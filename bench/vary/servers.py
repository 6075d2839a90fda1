"""Starts the servers that are measured: this checkout, another one of ours, this one once more, a real Triton."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.footprint import proportional
from bench.server import ROOT, serving, used_us

OURS, OTHER, CONTROL, PEER = "ours", "other", "control", "peer"
_PORTS = {OURS: 18180, OTHER: 18190, CONTROL: 18170}
#: Where triton.sh serves.
_PEER_HTTP, _PEER_GRPC = "127.0.0.1:18000", "127.0.0.1:18001"


@dataclass(frozen=True, slots=True)
class Server:
    """One server that is measured. ``pid``: of its first process; None: it is not known. ``python``: its checkout's."""

    name: str
    http: str
    grpc: str
    pid: int | None = None
    python: str = sys.executable

    def address(self, protocol: str) -> str:
        """Returns the address for a protocol, named as in a pool."""
        return self.http if protocol == "http" else self.grpc

    def used_us(self) -> dict[str, float]:
        """Returns the processor time of its processes so far, in microseconds, by their names; empty: it is not known."""
        return {} if self.pid is None else used_us(self.pid)

    def megabytes(self) -> float | None:
        """Returns the memory of all its processes in MB, what several share counted once; None: not known."""
        return None if self.pid is None else proportional(self.pid) / 1e6


def program(checkout: Path) -> list[str]:
    """Returns the command of a checkout's daemon, to be run in that checkout, with its own Python if it has one."""
    python = checkout / ".venv" / "bin" / "python"
    # Older ones have no package of that name.
    module = "tensord" if (checkout / "tensord" / "__main__.py").exists() else "daemon"
    return [str(python) if python.exists() else sys.executable, "-m", module]


@contextlib.contextmanager
def ours(name: str, checkout: Path, logs: Path, *words: str) -> Iterator[Server]:
    """Runs a daemon of a checkout within the block. The models and the configuration are those of this checkout.

    ``words``: of its command line, besides.
    """
    http, grpc = (f"127.0.0.1:{_PORTS[name] + more}" for more in (0, 1))
    command = [*program(checkout), "serve", "--config", str(ROOT / "bench" / "serve.toml")]
    command += [f"--model-repository={ROOT / 'bench' / 'models'}", "--allow-metrics=false", *words]
    command += [f"--http-port={_PORTS[name]}", f"--grpc-port={_PORTS[name] + 1}"]
    with serving(command, http, logs / f"bench-{name}.log", cwd=checkout) as pid:
        yield Server(name, http, grpc, pid, command[0])


@contextlib.contextmanager
def peer(where: str, logs: Path, models: Path | None = None) -> Iterator[Server]:
    """Runs a real Triton within the block.

    Args:
      where: a folder with setup.sh and triton.sh; or HTTP,GRPC, the addresses of one that runs already.
      models: what it serves; None: the models of its folder.
    """
    if ":" in where:
        http, _, grpc = where.partition(",")
        yield Server(PEER, http, grpc)
        return
    folder = Path(where).resolve()
    subprocess.run([folder / "setup.sh"], check=True, stdout=subprocess.DEVNULL)
    command = [str(folder / "triton.sh"), str(models or folder / "models")]
    with serving(command, _PEER_HTTP, logs / "bench-peer.log") as pid:
        yield Server(PEER, _PEER_HTTP, _PEER_GRPC, pid)
