"""Overload as an operator sees it: what is refused is in the metrics by reason, and in the log by model, once a minute."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonProcess, wait_until
from tests.repositories import scale_model, sleepy_model
from tests.scrapes import scrape

Start = Callable[..., DaemonProcess]
REQUESTS = 12


def ask(daemon: DaemonProcess, until: Path, model: str = "sleepy") -> str:
    """Sends a request that is answered once a file exists; returns its error, or ""."""
    import numpy as np

    with httpclient.InferenceServerClient(daemon.url, network_timeout=600, connection_timeout=600) as client:
        given = httpclient.InferInput("DELAY_MS", [1], "INT32")
        given.set_data_from_numpy(np.zeros(1, np.int32))
        try:
            client.infer(model, [given], parameters={"until": str(until)})
        except InferenceServerException as error:
            assert error.status() == "503"
            return str(error.message())
        return ""


def overload(daemon: DaemonProcess, refused: int, until: Path) -> Counter[str]:
    """Sends twelve requests at once, waits until so many are refused, and lets the others be answered."""
    with ThreadPoolExecutor(REQUESTS) as threads:
        answers = [threads.submit(ask, daemon, until) for _ in range(REQUESTS)]
        wait_until(lambda: sum(answer.done() for answer in answers) == refused, f"{refused} refusals", daemon)
        until.touch()
        return Counter(answer.result() for answer in answers)


def test_a_full_queue(start_daemon: Start, tmp_path: Path) -> None:
    """One runs, two wait, ten are refused."""
    scale_model(tmp_path / "models")
    sleepy_model(tmp_path / "models")
    daemon = start_daemon(tmp_path / "models", requests={"max_queue_size": 2})
    daemon.wait_ready()
    with ThreadPoolExecutor(1) as threads:
        # The first is out of the queue before the others come.
        first, began = tmp_path / "first", tmp_path / "began"
        running = threads.submit(run_first, daemon, began, first)
        wait_until(began.exists, "the first request to run", daemon)
        answers = overload(daemon, REQUESTS - 2, first)
        running.result()
    assert answers == {"": 2, "[request id: <id_unknown>] Exceeds maximum queue size": 10}
    samples = scrape(daemon.metrics_url)
    assert samples.model("nv_inference_request_failure", "sleepy", reason="REJECTED") == 10
    assert samples.model("tensord_model_refused_total", "sleepy", reason="queue_full") == 10
    assert samples.model("tensord_model_refused_total", "scale", reason="queue_full") == 0
    # In Triton's statistics they count nowhere.
    with httpclient.InferenceServerClient(daemon.url) as client:
        (statistics,) = client.get_inference_statistics("sleepy")["model_stats"]
        assert statistics["inference_stats"]["fail"]["count"] == 0
    daemon.wait_log(r"worker-0\W+refused with 503 in the last \d+ s: \d+ for model 'sleepy' \(queue_full\)")
    assert len(re.findall("refused with 503", daemon.log)) == 1


def run_first(daemon: DaemonProcess, began: Path, until: Path) -> None:
    parameters = {"began": str(began), "until": str(until)}
    given = [{"name": "DELAY_MS", "datatype": "INT32", "shape": [1], "data": [0]}]
    assert daemon.infer("sleepy", given, parameters=parameters)[0] == 200


def test_too_many_in_flight(start_daemon: Start, tmp_path: Path) -> None:
    sleepy_model(tmp_path / "models")
    daemon = start_daemon(tmp_path / "models", requests={"max_in_flight": 3})
    daemon.wait_ready()
    answers = overload(daemon, REQUESTS - 3, tmp_path / "until")
    assert answers == {"": 3, "3 requests are in flight, at most 3 are allowed": 9}
    samples = scrape(daemon.metrics_url)
    assert samples.value("tensord_front_refused_total", front="http-0", protocol="http", reason="in_flight") == 9
    assert samples.value("tensord_front_refused_total", front="grpc-0", protocol="grpc", reason="in_flight") == 0
    daemon.wait_log(r"http-0\W+refused with 503 in the last \d+ s: \d+ for model 'sleepy' \(in_flight\)")
    # Another front in its place goes on counting.
    daemon.fronts[0].kill()
    wait_until(lambda: len(daemon.fronts) == 1 and daemon.log.count("is up, serving http") == 2, "a front", daemon)
    samples = scrape(daemon.metrics_url)
    assert samples.value("tensord_front_refused_total", front="http-0", protocol="http", reason="in_flight") == 9


@pytest.mark.parametrize(
    ("options", "reason", "words"),
    [
        ({"requests": {"timeout": 0.2}}, "no_answer", "no answer within 0.2 s"),
        (
            {"http": {"max_collected_byte_size": 4096, "max_body_byte_size": 1 << 20}},
            "bodies",
            "bytes of request bodies are",
        ),
    ],
)
def test_other_reasons(
    start_daemon: Start, tmp_path: Path, options: dict[str, dict[str, float]], reason: str, words: str
) -> None:
    sleepy_model(tmp_path / "models")
    daemon = start_daemon(tmp_path / "models", **options)
    daemon.wait_ready()
    given = [{"name": "DELAY_MS", "datatype": "INT32", "shape": [1], "data": [0]}]
    padding = {"padding": "x" * 100_000} if reason == "bodies" else {"until": str(tmp_path / "until")}
    status, answer = daemon.infer("sleepy", given, parameters=padding)
    (tmp_path / "until").touch()
    assert (status, words in answer["error"]) == (503, True)
    samples = scrape(daemon.metrics_url)
    assert samples.value("tensord_front_refused_total", front="http-0", protocol="http", reason=reason) == 1
    daemon.wait_log(rf"http-0\W+refused with 503 in the last \d+ s: 1 for model 'sleepy' \({reason}\)")
