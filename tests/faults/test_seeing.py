"""Tests observers: scrapers, collectors that hang, full disks. Requests pay nothing for them."""

from __future__ import annotations

import gzip
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.generated import times

#: Each of which would wake a front that were asked.
SCRAPES = times(1000, 300)
ACCEPTS = ("", "application/openmetrics-text;version=1.0.0")


def front(daemon: DaemonProcess, protocol: str) -> psutil.Process:
    (found,) = daemon.children(f"tensord.daemon.{protocol}")
    return found


def wake_ups(process: psutil.Process) -> int:
    """Returns how often the threads of a process have slept and been woken since its start."""
    return sum(
        int((task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        for task in Path(f"/proc/{process.pid}/task").iterdir()
    )


def infer(daemon: DaemonProcess, count: int) -> None:
    """Asks over both protocols; each is answered well."""
    values = np.ones((1, 4), np.float32)
    with (
        httpclient.InferenceServerClient(daemon.url, connection_timeout=PATIENCE, network_timeout=PATIENCE) as http,
        grpcclient.InferenceServerClient(daemon.grpc_url) as grpc,
    ):
        for library, client in [(httpclient, http), (grpcclient, grpc)] * count:
            x = library.InferInput("x", [1, 4], "FP32")
            x.set_data_from_numpy(values)
            np.testing.assert_array_equal(client.infer("scale", [x]).as_numpy("y"), 3 * values + 1)


def test_scrapes(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    """
    1. Requests over HTTP all the time, none over gRPC, and hundreds of scrapes in either format, compressed or not.
    Result: all requests are answered; the front for gRPC was not woken for a scrape; nothing is left open.
    """
    repositories.scale_model(tmp_path / "models")
    daemon = start_daemon(tmp_path / "models")
    daemon.wait_ready()
    body = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0] * 4}]
    stop, statuses = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            statuses.append(daemon.infer("scale", body)[0])

    def scrape(number: int) -> bytes:
        headers = {"Accept": ACCEPTS[number % 2]} | ({"Accept-Encoding": "gzip"} if number % 3 == 0 else {})
        asked = urllib.request.Request(f"http://{daemon.metrics_url}/metrics", headers=headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            content: bytes = answer.read()
        return gzip.decompress(content) if number % 3 == 0 else content

    supervisor, idle = psutil.Process(daemon.pid), front(daemon, "grpc")
    scrape(0)
    open_files, threads = supervisor.num_fds(), supervisor.num_threads()
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        before = wake_ups(idle)
        for number in range(SCRAPES):
            assert b"tensord_ready 1.0" in scrape(number)
        assert wake_ups(idle) - before < SCRAPES // 2
    finally:
        stop.set()
        asking.join()
    assert statuses
    assert set(statuses) == {200}
    wait_until(lambda: supervisor.num_fds() <= open_files, f"{open_files} open files", daemon)
    assert supervisor.num_threads() == threads


@pytest.fixture
def hanging() -> Iterator[str]:
    """Yields the URL of a collector that accepts connections, and neither reads nor answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces"


def test_a_collector_that_hangs(start_daemon: Callable[..., Any], tmp_path: Path, hanging: str) -> None:
    """All requests are traced, and more of them than spans may wait: neither connections pile up, nor threads, nor lines."""
    repositories.scale_model(tmp_path / "models")
    daemon = start_daemon(tmp_path / "models", trace={"otlp": hanging, "rate": 1, "level": ["TIMESTAMPS"]})
    daemon.wait_ready()
    infer(daemon, 200)
    known = {protocol: front(daemon, protocol) for protocol in ("http", "grpc")}
    before = {protocol: (process.num_fds(), process.num_threads()) for protocol, process in known.items()}
    # Of five spans each: with those before more than four times as many as may wait.
    infer(daemon, 1500)
    after = {protocol: (process.num_fds(), process.num_threads()) for protocol, process in known.items()}
    for protocol, (files, threads) in after.items():
        assert files <= before[protocol][0] + 2
        assert threads <= before[protocol][1] + 1
    assert len(daemon.log.splitlines()) < 200
    assert daemon.stop() == 0


def test_full_disks(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    """The log's, with a line for each request, and that of traces, with each request: all are answered, and it is said seldom."""
    repositories.scale_model(tmp_path / "models")
    daemon = start_daemon(
        tmp_path / "models",
        log={"file": "/dev/full", "access": 1},
        trace={"file": "/dev/full", "rate": 1, "level": ["TIMESTAMPS"]},
    )
    daemon.wait_ready()
    infer(daemon, 300)
    wait_until(lambda: "traces cannot be written to /dev/full" in daemon.log, "a word about traces", daemon)
    assert os.strerror(28) in daemon.log
    said = re.findall(r"log file /dev/full cannot be written|traces cannot be written", daemon.log)
    assert 2 <= len(said) < 60
    # What has no place in the file is on standard error.
    wait_until(lambda: daemon.log.count('"code":"200"') >= 300, "a line for each request", daemon)
    assert daemon.stop() == 0
