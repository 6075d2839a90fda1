"""Histograms of a real daemon: every request of a client is in them once, under its protocol, whichever part answered it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tensord.shm.messages import PreparedRequest
from tests import repositories
from tests.daemon.clients.lane_client import LaneClient
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.protocol.streaming_models import CONFIG, TALKS, Stream
from tests.raw_lane import RawLane, tensor
from tests.scrapes import Samples, scrape

VALUES = np.arange(8, dtype=np.float32).reshape(2, 4)
BODY = [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": VALUES.ravel().tolist()}]
KINDS = ("request", "queue", "compute")


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sockets")


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory, sockets: Path) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    repositories.scale_model(repository)
    repositories.sleepy_model(repository)
    repositories.scale_model(repository, "cached")
    (repository / "cached" / "config.pbtxt").write_text("response_cache { enable: true }\n")
    steps = [("scale", {"x": "a"}, {"y": "t"}), ("scale", {"x": "t"}, {"y": "b"})]
    repositories.ensemble(repository, "twice", ["a FP32 4"], ["b FP32 4"], steps, 8)
    repositories.write_model(repository, "talks", TALKS, CONFIG)
    options = {
        "metrics": {"buckets": [0.000001, 100, 1000]},
        "clients": {"socket": str(sockets / "clients.sock")},
        "response_cache": {"byte_size": 1 << 20},
    }
    return daemon_of(repository, options)


def count(samples: Samples, kind: str, model: str, protocol: str, le: str = "100.0") -> tuple[float, float, float]:
    """Returns how many requests are within a bound, how many there are, and the sum of their durations."""
    name = f"tensord_{kind}_duration_seconds"
    labels = {"model": model, "protocol": protocol, "version": "1"}
    try:
        whole = samples.value(f"{name}_count", **labels)
    except KeyError:
        return 0, 0, 0
    assert samples.value(f"{name}_bucket", **labels, le="+Inf") == whole
    return samples.value(f"{name}_bucket", **labels, le=le), whole, samples.value(f"{name}_sum", **labels)


def counted(daemon: DaemonProcess, model: str, **expected: int) -> Samples:
    """Waits until so many requests of each protocol are counted: what was answered is counted a moment later."""
    found: list[Samples] = []

    def there() -> bool:
        found[:] = [scrape(daemon.metrics_url)]
        return all(count(found[0], "request", model, protocol)[1] >= number for protocol, number in expected.items())

    wait_until(there, f"{expected} of {model}", daemon)
    for protocol, number in expected.items():
        assert count(found[0], "request", model, protocol)[1] == number, protocol
    return found[0]


def test_each_protocol(daemon: DaemonProcess, sockets: Path) -> None:
    """Requests that repeat are answered in C after the first few: all are counted alike, and sums are those of the counters."""
    for _ in range(30):
        assert daemon.infer("scale", BODY)[0] == 200
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        given = grpcclient.InferInput("x", [2, 4], "FP32")
        given.set_data_from_numpy(VALUES)
        for _ in range(20):
            client.infer("scale", [given])
    with LaneClient(sockets / "clients.sock") as connected:
        connected.ask(hello={})
        (entry,) = connected.open("scale")["lanes"]
        lane = RawLane(connected.lanes.pop(entry["lane"]))
        for _ in range(10):
            lane.ask(PreparedRequest("scale", 0, (tensor("x", VALUES),)), VALUES.tobytes())
            answers = []
            while not answers:
                assert lane.poll(PATIENCE)
                answers = lane.receive()
            assert not answers[0].code
        lane.close()
    samples = counted(daemon, "scale", http=30, grpc=20, lane=10)
    for kind in KINDS:
        for protocol, number in (("http", 30), ("grpc", 20), ("lane", 10)):
            assert count(samples, kind, "scale", protocol)[:2] == (number, number)
            # No program of XLA runs within a microsecond; a wait in the queue may be shorter.
            assert kind == "queue" or count(samples, kind, "scale", protocol, "1e-06")[0] == 0
    assert samples.model("nv_inference_request_success", "scale") == 60
    for kind, metrics in (
        ("request", ["nv_inference_request_duration_us"]),
        ("queue", ["nv_inference_queue_duration_us"]),
        ("compute", [f"nv_inference_compute_{part}_duration_us" for part in ("input", "infer", "output")]),
    ):
        seconds = sum(count(samples, kind, "scale", protocol)[2] for protocol in ("http", "grpc", "lane"))
        assert seconds * 1e6 == pytest.approx(
            sum(samples.model(metric, "scale") for metric in metrics), abs=len(metrics) + 1
        )


def test_refused_and_failed_requests_are_not_in_them(daemon: DaemonProcess) -> None:
    assert daemon.infer("sleepy", [{**BODY[0], "shape": [8]}])[0] == 400
    assert count(scrape(daemon.metrics_url), "request", "sleepy", "http")[1] == 0


def test_several_responses(daemon: DaemonProcess) -> None:
    with Stream(daemon.grpc_url) as stream:
        for n in (3, 1, 2):
            assert len(stream.answers("talks", n)) >= n
    samples = counted(daemon, "talks", grpc=3)
    within, whole, first = count(samples, "first_response", "talks", "grpc")
    assert (within, whole) == (3, 3)
    assert 0 < first <= count(samples, "request", "talks", "grpc")[2]
    assert count(samples, "first_response", "scale", "http")[1] == 0


def test_answers_from_the_cache_ran_nothing(daemon: DaemonProcess) -> None:
    for _ in range(5):
        assert daemon.infer("cached", BODY)[0] == 200
    samples = counted(daemon, "cached", http=5)
    assert count(samples, "queue", "cached", "http")[1] == 5
    assert count(samples, "compute", "cached", "http")[1] == 1


def test_an_ensemble_is_one_request(daemon: DaemonProcess) -> None:
    """Its steps are in the counters of their models, and in no histogram: neither the first ones nor those of the pipeline."""
    before = count(scrape(daemon.metrics_url), "request", "scale", "http")[1]
    for _ in range(20):
        assert daemon.infer("twice", [{**BODY[0], "name": "a"}])[0] == 200
    samples = counted(daemon, "twice", http=20)
    assert count(samples, "request", "scale", "http")[1] == before
    assert count(samples, "compute", "twice", "http")[:2] == (20, 20)


def test_a_killed_worker_leaves_what_was_seen_of_it(daemon: DaemonProcess) -> None:
    for _ in range(3):
        daemon.infer("twice", [{**BODY[0], "name": "a"}])
    before = count(counted(daemon, "twice", http=23), "request", "twice", "http")
    daemon.workers[0].kill()
    assert daemon.infer("twice", [{**BODY[0], "name": "a"}])[0] == 200
    after = count(counted(daemon, "twice", http=24), "request", "twice", "http")
    assert after[2] > before[2]
