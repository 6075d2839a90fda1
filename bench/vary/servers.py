"""Who is measured: this checkout, another one of ours, a real Triton."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.footprint import proportional
from bench.server import ROOT, Usage, children, serving

OURS, OTHER, PEER = "ours", "other", "peer"
_PORTS = {OURS: 18180, OTHER: 18190}
#: Where triton.sh serves.
_PEER_HTTP, _PEER_GRPC = "127.0.0.1:18000", "127.0.0.1:18001"


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs."""

    name: str
    http: str
    grpc: str
    #: None: somebody else started it.
    pid: int | None

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


@contextlib.contextmanager
def ours(name: str, checkout: Path, logs: Path) -> Iterator[Server]:
    """A daemon of a checkout; the models and the configuration are always ours."""
    port = _PORTS[name]
    http, grpc = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    command = [*program(checkout), "serve", "--config", str(ROOT / "bench" / "serve.toml")]
    command += [f"--model-repository={ROOT / 'bench' / 'models'}"]
    command += [f"--http-port={port}", f"--grpc-port={port + 1}", "--allow-metrics=false"]
    with serving(command, http, logs / f"bench-vary-{name}.log", cwd=checkout) as pid:
        yield Server(name, http, grpc, pid)


@contextlib.contextmanager
def peer(where: str, logs: Path) -> Iterator[Server]:
    """A real Triton: in a folder with setup.sh and triton.sh, which is started, or HTTP,GRPC: addresses of one that runs."""
    if ":" in where:
        http, _, grpc = where.partition(",")
        yield Server(PEER, http, grpc, None)
        return
    folder = Path(where).resolve()
    subprocess.run([folder / "setup.sh"], check=True, stdout=subprocess.DEVNULL)
    command = [str(folder / "triton.sh"), str(folder / "models")]
    with serving(command, _PEER_HTTP, logs / "bench-peer.log") as pid:
        yield Server(PEER, _PEER_HTTP, _PEER_GRPC, pid)
