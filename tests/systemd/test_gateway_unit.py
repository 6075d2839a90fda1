"""The gateway's unit under a real systemd, as docs/robots.md installs it, beside a daemon that serves one model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon_process import ROOT, wait_until
from tests.repositories import scale_model
from tests.systemd.machine import Machine, machine

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PYTHON = "/opt/tensord/openpi/bin/python"
_CONFIG = """
repository.paths = ["/srv/given/models"]
clients.socket = "/run/tensord/clients.sock"
workers.device = "cpu"
http.port = 0
grpc.port = 0
metrics.port = 0
"""
#: Stands for the environment of the page: this one's libraries, and the client of this checkout.
_INSTALL = f"""
mkdir -p /opt/tensord/openpi/bin
printf '#!/bin/sh\\nPYTHONPATH=/opt/checkout/client:/opt/checkout:%s exec /usr/bin/python3 "$@"\\n' $LIBRARIES > {_PYTHON}
chmod 755 {_PYTHON}
cp -r /opt/given /srv/given
chmod -R a+rX /srv/given
useradd --system --user-group tensord
cp /opt/checkout/systemd/tensord-openpi.service /etc/systemd/system/
systemctl daemon-reload
"""
_DAEMON = f"""
systemd-run --quiet --unit=tensord -p Type=notify -p Restart=always -p User=tensord -p RuntimeDirectory=tensord \\
    -p RuntimeDirectoryMode=0750 -p UMask=0027 {_PYTHON} -m tensord serve --config /srv/given/serve.toml
"""
_ROBOT = """
import msgpack, numpy as np, websockets.sync.client as websocket
with websocket.connect("ws://127.0.0.1:8900/scale", compression=None) as connection:
    told = msgpack.unpackb(connection.recv())
    x = np.arange(4, dtype=np.float32)
    array = {b"__ndarray__": True, b"data": x.tobytes(), b"dtype": "<f4", b"shape": [4]}
    connection.send(msgpack.packb({"x": array}))
    print(np.frombuffer(msgpack.unpackb(connection.recv())["y"][b"data"], "<f4").tolist())
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "layer").mkdir()
    scale_model(tmp_path / "given" / "models")
    (tmp_path / "given" / "serve.toml").write_text(_CONFIG)
    libraries = [Path(path) for path in sys.path if Path(path).name == "site-packages"]
    places = [(path, f"/opt/libraries/{number}") for number, path in enumerate(libraries)]
    mounts = [(ROOT, "/opt/checkout"), (tmp_path / "given", "/opt/given"), *places]
    environment = {"PATH": _PATH, "LIBRARIES": ":".join(where for _, where in places)}
    with machine(tmp_path / "layer", mounts, environment) as found:
        version = f"import sys; assert sys.version_info[:2] == {sys.version_info[:2]}"
        if found.try_run(f"/usr/bin/python3 -c '{version}'").returncode:
            pytest.skip("the system's Python cannot use the libraries of this one")
        found.run(_INSTALL)
        yield found


def test_it_waits_for_the_daemon_outlives_it_and_stops(host: Machine) -> None:
    host.run("systemctl start --no-block tensord-openpi")
    host.run(_DAEMON)
    host.run("systemctl start tensord-openpi")

    def is_answered() -> bool:
        return host.try_run(f"{_PYTHON} -c '{_ROBOT}'").stdout == "[1.0, 4.0, 7.0, 10.0]\n"

    wait_until(is_answered, "an answer")
    host.run("systemctl kill --kill-whom=main --signal=SIGKILL tensord")
    wait_until(is_answered, "an answer of the next daemon")
    host.run("systemctl stop tensord-openpi")
    assert "Result=success\n" in host.run("systemctl show -p Result tensord-openpi")
    journal = host.run("journalctl --no-pager -u tensord-openpi -o cat")
    assert journal.count("robots are served on 127.0.0.1:8900") == 1
    assert not re.search("Traceback|HTTP", journal), journal
