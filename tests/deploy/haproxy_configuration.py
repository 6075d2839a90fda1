"""Makes HAProxy's configuration for daemons of this host: deploy/haproxy with other addresses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.daemon_process import ROOT

CONFIGURATION = ROOT / "deploy/haproxy/haproxy.cfg"


class Daemon(NamedTuple):
    """The ports of 127.0.0.1 that a daemon listens on."""

    http: int
    grpc: int
    agent: int


class Balancer(NamedTuple):
    """The ports of 127.0.0.1 that HAProxy listens on, and its admin socket."""

    http: int
    grpc: int
    metrics: int
    socket: Path


def configuration(daemons: Sequence[Daemon], balancer: Balancer) -> str:
    """Returns deploy's haproxy.cfg with these addresses in place of its own, and with only as many servers as there are daemons.

    Raises ValueError: the file lacks an address that is to be replaced, or has more than three daemons.
    """
    replaced = {
        "bind :8000": f"bind 127.0.0.1:{balancer.http}",
        "bind :8001": f"bind 127.0.0.1:{balancer.grpc}",
        "bind 127.0.0.1:8405": f"bind 127.0.0.1:{balancer.metrics}",
        "/run/haproxy/admin.sock": str(balancer.socket),
    }
    for number, daemon in enumerate(daemons, 1):
        address = f"10.0.0.{number}"
        replaced |= {
            f"{address}:8000": f"127.0.0.1:{daemon.http}",
            f"{address}:8001": f"127.0.0.1:{daemon.grpc}",
            f"{address} port 8000": f"127.0.0.1 port {daemon.http}",
            f"{address} agent-port 8003": f"127.0.0.1 agent-port {daemon.agent}",
        }
    text = CONFIGURATION.read_text()
    for found, given in replaced.items():
        if found not in text:
            raise ValueError(f"{CONFIGURATION} has no {found!r}")
        text = text.replace(found, given)
    return re.sub(r"^    server \w 10\.0\.0\..*\n", "", text, flags=re.MULTILINE)
