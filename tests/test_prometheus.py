"""Debian's Prometheus with what lies in deploy/: it scrapes a real daemon, knows the rules, answers the board, and alerts fire.

Only the target's address, the times and the ports are those of the test; expressions are as they are shipped.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests import repositories
from tests.collector import Collector
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.test_deploy import DEPLOY, panels

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
)
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class Prometheus:
    """Runs a Prometheus that scrapes one daemon every second."""

    def __init__(self, folder: Path, target: str) -> None:
        config = (DEPLOY / "prometheus.yml").read_text()
        assert "127.0.0.1:8002" in config
        config = config.replace("127.0.0.1:8002", target).replace(": 15s", ": 1s")
        (folder / "prometheus.yml").write_text(config)
        # What has to hold for minutes has to hold now.
        (folder / "rules.yml").write_text(re.sub(r"for: \d+m", "for: 0s", (DEPLOY / "rules.yml").read_text()))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._log = (folder / "prometheus.log").open("wb")
        assert PROMETHEUS is not None
        self._process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        """Returns the data that its API answers. Raises OSError: it does not answer, or says that something is wrong."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return json.load(answer)["data"]

    def health(self) -> list[str]:
        """Returns the health of each target; [] until Prometheus answers."""
        try:
            return [target["health"] for target in self.ask("targets")["activeTargets"]]
        except OSError:
            return []

    def firing(self, name: str) -> list[dict[str, str]]:
        """Returns the labels of each firing alert with that name."""
        alerts = self.ask("alerts")["alerts"]
        return [each["labels"] for each in alerts if each["labels"]["alertname"] == name and each["state"] == "firing"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def collector(leaves_nothing: None) -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def daemon(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Runs a daemon that is not ready, because a required model is absent."""
    folder = tmp_path_factory.mktemp("scraped")
    repositories.scale_model(folder / "models")
    (folder / "daemon").mkdir()
    options: dict[str, dict[str, Any]] = {
        "repository": {"required": ["scale", "absent"], "strict_readiness": True},
        "trace": {"otlp": collector.url, "rate": 1000000},
    }
    with DaemonProcess(folder / "daemon", [folder / "models"], options, ready=False) as running:
        wait_until(lambda: infers(running), "scale", running)
        yield running


@pytest.fixture(scope="module")
def prometheus(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with contextlib.closing(Prometheus(tmp_path_factory.mktemp("prometheus"), daemon.metrics_url)) as made:
        wait_until(lambda: made.health() == ["up"], "a scrape", daemon)
        yield made


def infers(daemon: DaemonProcess, traceparent: str = "") -> bool:
    """Returns whether a request is answered without an error."""
    x = httpclient.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.ones((1, 4), np.float32))
    headers = {"traceparent": traceparent} if traceparent else None
    with httpclient.InferenceServerClient(daemon.url, connection_timeout=PATIENCE, network_timeout=PATIENCE) as client:
        try:
            client.infer("scale", [x], headers=headers)
        except httpclient.InferenceServerException:
            return False
    return True


def test_the_rules_are_loaded(prometheus: Prometheus) -> None:
    (group,) = prometheus.ask("rules")["groups"]
    shipped = re.findall(r"- alert: (\w+)", (DEPLOY / "rules.yml").read_text())
    assert [rule["name"] for rule in group["rules"]] == shipped
    wait_until(
        lambda: {rule["health"] for rule in prometheus.ask("rules")["groups"][0]["rules"]} == {"ok"}, "an evaluation"
    )


def test_the_board_is_answered(daemon: DaemonProcess, prometheus: Prometheus) -> None:
    """Each expression; those that there is something to show for show it."""
    shown = [(panel["title"], target["expr"]) for panel in panels() for target in panel.get("targets", ())]
    # Grafana's variables, as it fills them in.
    filled = {"$job": "tensord", "$instance": ".*", "$model": ".*", "$__rate_interval": "1m"}
    # Of what these have, this daemon has nothing.
    empty = re.compile(r"first_response|gpu|sequences|refused|failure|deaths_total|model_state|compiles")

    def answered() -> list[str]:
        infers(daemon)
        missing = []
        for title, expression in shown:
            for name, value in filled.items():
                expression = expression.replace(name, value)
            data = prometheus.ask("query", query=expression)
            if not data["result"] and not empty.search(expression):
                missing.append(f"{title}: {expression}")
        return missing

    last: list[str] = []

    def all_shown() -> bool:
        last[:] = answered()
        return not last

    wait_until(all_shown, "something to show in each panel", daemon)


def test_exemplars_are_kept(daemon: DaemonProcess, prometheus: Prometheus) -> None:
    """It asks for OpenMetrics, and stores what trace stands for a bucket."""

    def found() -> set[str]:
        assert infers(daemon, f"00-{TRACE_ID}-00f067aa0ba902b7-01")
        data = prometheus.ask(
            "query_exemplars", query="tensord_request_duration_seconds_bucket", start="0", end=str(1 << 33)
        )
        return {each["labels"]["trace_id"] for series in data for each in series["exemplars"]}

    wait_until(lambda: found() == {TRACE_ID}, "an exemplar", daemon)


def test_a_model_that_is_missing(daemon: DaemonProcess, prometheus: Prometheus) -> None:
    wait_until(lambda: bool(prometheus.firing("TensordNotReady")), "TensordNotReady", daemon)
    wait_until(lambda: bool(prometheus.firing("TensordModelNotServed")), "TensordModelNotServed", daemon)
    assert [labels["model"] for labels in prometheus.firing("TensordModelNotServed")] == ["absent"]
    for name in ("TensordProcessDies", "TensordWorkerDown", "TensordDown", "TensordReloadRefused"):
        assert prometheus.firing(name) == []


def test_a_worker_that_dies_again_and_again(daemon: DaemonProcess, prometheus: Prometheus) -> None:
    def killed() -> bool:
        known = {worker.pid for worker in daemon.workers}
        for worker in daemon.workers:
            worker.kill()
        wait_until(
            lambda: infers(daemon) and not known & {worker.pid for worker in daemon.workers}, "a replacement", daemon
        )
        return bool(prometheus.firing("TensordProcessDies"))

    wait_until(killed, "TensordProcessDies", daemon)
    labels = prometheus.firing("TensordProcessDies")
    assert {(each["process"], each["cause"]) for each in labels} == {("worker-0", "SIGKILL")}
    assert all(each["severity"] == "page" for each in labels)


def test_a_daemon_that_is_gone(daemon: DaemonProcess, prometheus: Prometheus) -> None:
    assert prometheus.firing("TensordDown") == []
    daemon.stop()
    wait_until(lambda: bool(prometheus.firing("TensordDown")), "TensordDown")
    assert prometheus.health() == ["down"]
