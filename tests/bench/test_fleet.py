"""The measurement of several daemons: HAProxy takes the configuration that it makes for as many as there are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bench import fleet
from tests.deploy.balancer import HAPROXY

BALANCER = fleet.Balancer(19, 20, 21, Path("/tmp/admin.sock"))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_there_is_a_server_for_each_daemon(count: int, tmp_path: Path) -> None:
    daemons = [fleet.Daemon(number, number + 1, number + 2) for number in range(100, 100 + 3 * count, 3)]
    text = fleet.configuration(daemons, BALANCER)
    servers = re.findall(r"^    server \w 127\.0\.0\.1:(\d+) ", text, re.MULTILINE)
    # Over HTTP and gRPC, both for sequences as well, and HTTP once more for their state.
    assert sorted(map(int, servers)) == sorted(port for each in daemons for port in (each.http,) * 3 + (each.grpc,) * 2)
    assert re.findall(r"bind (\S+)", text) == ["127.0.0.1:19", "127.0.0.1:20", "127.0.0.1:21"]
    if HAPROXY is not None:
        file = tmp_path / "haproxy.cfg"
        file.write_text(text)
        assert subprocess.run([HAPROXY, "-c", "-f", str(file)], capture_output=True, check=False).returncode == 0


def test_there_are_three_at_most() -> None:
    with pytest.raises(ValueError, match=r"has no '10\.0\.0\.4:8000'"):
        fleet.configuration([fleet.Daemon(1, 2, 3)] * 4, BALANCER)
