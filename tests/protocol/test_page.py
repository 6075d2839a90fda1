"""The page on the port of the metrics, of a real daemon: as text, and in a browser where one is installed."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensord.shm.messages import PreparedRequest, PreparedTensor
from tests import repositories
from tests.daemon.clients.lane_client import LaneClient
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess
from tests.raw_lane import RawLane

BODY = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
)


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("page")
    repositories.scale_model(folder / "models")
    repositories.write_model(
        folder / "models", "broken", "def create(path, config, device):\n    raise ValueError('<b>no</b>')"
    )
    options = {"repository": {"strict_readiness": False}, "clients": {"socket": str(folder / "clients.sock")}}
    return daemon_of(folder / "models", options, folder=folder)


def get(daemon: DaemonProcess, path: str = "/", method: str = "GET") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(daemon.metrics_url, timeout=PATIENCE)
    connection.request(method, path)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def errors(daemon: DaemonProcess) -> list[list[str]]:
    """Returns the cells of each row of the page's recent errors."""
    table = get(daemon)[2].partition("<h2>Recent errors</h2>")[2].partition("</table>")[0]
    return [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]


def test_it_says_what_is_served_and_why_not(daemon: DaemonProcess) -> None:
    status, headers, text = get(daemon)
    assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "text/html; charset=utf-8", "no-store")
    assert "<td>scale</td><td>1</td>" in text
    assert re.search(r"<td>broken</td><td></td><td>[^<]*outputs = {&quot;y&quot;", text)
    for process in (*daemon.workers, *daemon.fronts):
        assert f"<td>{process.pid}</td>" in text
    assert daemon.infer("nobody", BODY)[0] == 404
    assert {"http-0", "404", "nobody"} <= {*errors(daemon)[-1]}
    assert get(daemon, method="HEAD")[2] == ""
    assert get(daemon, "/other")[0] == 404


def test_it_has_the_errors_of_clients_on_lanes(daemon: DaemonProcess) -> None:
    """Workers answer those, and no front sees them."""
    with LaneClient(daemon.folder / "clients.sock") as client:
        client.ask(hello={})
        client.open("scale")
        (sock,) = client.lanes.values()
        with contextlib.closing(RawLane(sock)) as lane:
            wrong = PreparedRequest("scale", 0, (PreparedTensor("x", "FP32", (1, 5)),))
            lane.ask(wrong, bytes(20), client_id="the-lanes")
            while not (answers := lane.receive()):
                assert lane.poll(PATIENCE)
            assert answers[0].code == "INVALID_ARGUMENT"
            (row,) = [row for row in errors(daemon) if "the-lanes" in row]
            assert {"worker-0", "INVALID_ARGUMENT", "scale"} <= {*row}
            assert any("shape" in cell for cell in row)


def test_it_may_be_turned_off(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    repositories.scale_model(tmp_path / "models")
    daemon = start_daemon(tmp_path / "models", metrics={"page": False, "port": 0})
    daemon.wait_ready()
    assert (get(daemon)[0], get(daemon, "/metrics")[0]) == (404, 200)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.timeout(300)
def test_in_a_browser(daemon: DaemonProcess, tmp_path: Path) -> None:
    """The script runs under the page's own policy: tables are exchanged, and the latency of what is asked is drawn."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.01):
            daemon.infer("scale", BODY)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        done = subprocess.run(
            [
                BROWSER,
                *FLAGS,
                f"--user-data-dir={tmp_path / 'browser'}",
                "--virtual-time-budget=30000",
                "--dump-dom",
                f"http://{daemon.metrics_url}/",
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    finally:
        stop.set()
        asking.join()
    assert "<td>scale</td>" in done.stdout
    assert re.search(r"<figcaption>scale 1: p50 [\d.]+ ms, p99 [\d.]+ ms, [\d.]+ answers/s</figcaption>", done.stdout)
    assert "<polyline" in done.stdout
    assert '<p id="gone" class="bad"></p>' in done.stdout
