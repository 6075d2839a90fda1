"""Metrics of a real daemon: they say what the statistics say, over all fronts and workers, and no scraper hurts anybody."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from tests import repositories
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until
from tests.scrapes import Samples, scrape

#: As Triton's statistics have them -> the metric.
FIELDS = {
    "inference_count": "nv_inference_count",
    "execution_count": "nv_inference_exec_count",
    "copied_byte_size": "tensord_copied_bytes_total",
    "padded_rows": "tensord_padded_rows_total",
    "padded_elements": "tensord_padded_elements_total",
}
DURATIONS = {
    "success": "nv_inference_request_duration_us",
    "queue": "nv_inference_queue_duration_us",
    "compute_input": "nv_inference_compute_input_duration_us",
    "compute_infer": "nv_inference_compute_infer_duration_us",
    "compute_output": "nv_inference_compute_output_duration_us",
}
#: FP32 elements of a tensor in a region.
LENGTH = 1 << 14
SNAPSHOT = "tensord-test-metrics-snapshot"


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    """Runs a daemon with two fronts of each protocol and two workers."""
    repository = repositories.echo_models(tmp_path_factory.mktemp("repository"), ["FP32"])
    repositories.scale_model(repository)
    repositories.faulty_models(repository)
    repositories.write_model(
        repository,
        "lengths",
        repositories.of_x(
            "x.sum(1, keepdims=True)",
            "FP32[length]",
            "FP32[1]",
            more='max_batch_size = 4\nbuckets = {"length": (4, 16)}',
        ),
    )
    options = {
        "repository": {
            "strict_readiness": False,
            "control_mode": "explicit",
            "load": ["echo_fp32", "scale", "raises", "lengths"],
        },
        "http": {"processes": 2},
        "grpc": {"processes": 2},
        "workers": {"cpu": 2},
        "regions": {"snapshot_key_prefixes": [SNAPSHOT]},
    }
    return daemon_of(repository, options)


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Any]:
    with httpclient.InferenceServerClient(daemon.url, connection_timeout=PATIENCE, network_timeout=PATIENCE) as client:
        yield client


def in_body(library: Any, values: np.ndarray) -> Any:
    given = library.InferInput("x", list(values.shape), "FP32")
    given.set_data_from_numpy(values)
    return given


@contextlib.contextmanager
def regions(client: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Registers a region with values for an input and one for an output; yields their names."""
    values = np.arange(LENGTH, dtype=np.float32)
    names = f"{prefix}-in", f"{prefix}-out"
    with contextlib.ExitStack() as stack:
        for name in names:
            key = f"/{name}-{uuid.uuid4().hex}"
            handle = shm.create_shared_memory_region(name, key, 4 * LENGTH)
            stack.callback(shm.destroy_shared_memory_region, handle)
            client.register_system_shared_memory(name, key, 4 * LENGTH)
            stack.callback(client.unregister_system_shared_memory, name)
            shm.set_shared_memory_region(handle, [values])
        yield names


def infer_in_regions(client: Any, given: str, wanted: str) -> None:
    x = httpclient.InferInput("x", [LENGTH], "FP32")
    x.set_shared_memory(given, 4 * LENGTH)
    y = httpclient.InferRequestedOutput("y")
    y.set_shared_memory(wanted, 4 * LENGTH)
    client.infer("echo_fp32", [x], outputs=[y])


def settled(daemon: DaemonProcess, client: Any) -> tuple[Samples, dict[str, dict[str, Any]]]:
    """Returns a scrape that both workers answered, and the statistics with the same counts."""
    found: list[Any] = []

    def both_answered() -> bool:
        samples = scrape(daemon.metrics_url)
        found[:] = [samples, {entry["name"]: entry for entry in client.get_inference_statistics()["model_stats"]}]
        return sum(samples.of("tensord_worker_answered", "worker").values()) == 2

    wait_until(both_answered, "figures of both workers", daemon)
    return found[0], found[1]


def test_figures_are_those_of_the_statistics(daemon: DaemonProcess, client: Any) -> None:
    """After requests of every kind, over every front: in bodies and in regions, answered and failed."""
    small = np.arange(4, dtype=np.float32).reshape(1, 4)
    for _ in range(5):
        assert daemon.infer("scale", [{"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [1.0] * 8}])[0] == 200
        client.infer("scale", [in_body(httpclient, small)])
        with grpcclient.InferenceServerClient(daemon.grpc_url) as grpc:
            grpc.infer("scale", [in_body(grpcclient, small)])
    for _ in range(3):
        with pytest.raises(InferenceServerException):
            client.infer("raises", [in_body(httpclient, small[0, :2])])
        # Refused before it is counted anywhere.
        with pytest.raises(InferenceServerException):
            client.infer("scale", [in_body(httpclient, small[:, :3])])
    with regions(client, "tensord-test-metrics-guarded") as names:
        infer_in_regions(client, *names)
    samples, statistics = settled(daemon, client)
    assert statistics.keys() == {"scale", "echo_fp32", "raises", "lengths"}
    for name, entry in statistics.items():
        for field, metric in FIELDS.items():
            assert samples.model(metric, name) == entry[field], (name, metric)
        inference = entry["inference_stats"]
        for field, metric in DURATIONS.items():
            # Each worker's nanoseconds are summed before they become microseconds.
            assert samples.model(metric, name) == inference[field].get("ns", 0) // 1000, (name, metric)
        assert samples.model("nv_inference_request_success", name) == inference["success"]["count"]
        failed = {
            reason: samples.model("nv_inference_request_failure", name, reason=reason)
            for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
        }
        assert sum(failed.values()) == failed["BACKEND"] == inference["fail"]["count"]
        assert samples.model("nv_inference_pending_request_count", name) == 0
    assert samples.model("nv_inference_request_success", "scale") == 15
    assert samples.model("nv_inference_count", "scale") == 20
    assert samples.model("nv_inference_request_failure", "raises", reason="BACKEND") == 3
    assert samples.of("tensord_front_up", "front") == {"http-0": 1, "http-1": 1, "grpc-0": 1, "grpc-1": 1}


@pytest.mark.cpu_workers("what has to be copied for them")
def test_bytes_copied_for_a_request(daemon: DaemonProcess, client: Any) -> None:
    """Large bodies and guarded regions are used in place, snapshots and small tensors are copied, as docs/data-plane.md says."""
    size = 4 * LENGTH

    def copied() -> float:
        return settled(daemon, client)[0].model("tensord_copied_bytes_total", "echo_fp32")

    # The first request of a shape is compiled, and the first large body of a connection comes in pieces.
    bodies: list[float] = []
    for length in (LENGTH, LENGTH // 2):
        values = np.ones(length, np.float32)
        for _ in range(2):
            client.infer("echo_fp32", [in_body(httpclient, values)])
        before = copied()
        client.infer("echo_fp32", [in_body(httpclient, values)])
        bodies.append(copied() - before)
    with regions(client, "tensord-test-metrics-guarded") as names:
        before = copied()
        infer_in_regions(client, *names)
        guarded = copied() - before
    with regions(client, SNAPSHOT) as names:
        before = copied()
        infer_in_regions(client, *names)
        snapshot = copied() - before
    assert (bodies, guarded, snapshot) == ([0, size], 0, 2 * size)


def test_regions(daemon: DaemonProcess, client: Any) -> None:
    with regions(client, "tensord-test-metrics-guarded"):
        samples, _ = settled(daemon, client)
        assert samples.of("tensord_regions", "kind") == {"system": 2, "cuda": 0}
        assert samples.of("tensord_region_bytes", "kind") == {"system": 8 * LENGTH, "cuda": 0}
        assert samples.of("tensord_region_leases", "kind") == {"system": 0, "cuda": 0}
        assert samples.value("tensord_regions_max") == 4096
    assert scrape(daemon.metrics_url).of("tensord_regions", "kind") == {"system": 0, "cuda": 0}


def test_a_reload_and_an_unload(daemon: DaemonProcess, client: Any) -> None:
    """Statistics begin anew with a load; metrics go on where one replaces another, and end with an unload."""
    values = np.zeros((1, 4), np.float32)
    client.infer("scale", [in_body(httpclient, values)])
    before = settled(daemon, client)[0].model("nv_inference_request_success", "scale")
    config = client.get_model_config("scale")
    config["parameters"] = {"changed": {"string_value": "yes"}}
    client.load_model("scale", config=json.dumps(config))
    client.infer("scale", [in_body(httpclient, values)])
    samples, statistics = settled(daemon, client)
    assert statistics["scale"]["inference_stats"]["success"]["count"] == 1
    assert samples.model("nv_inference_request_success", "scale") == before + 1
    client.unload_model("scale")
    wait_until(lambda: not client.is_model_ready("scale"), "unload", daemon)
    assert "scale" not in scrape(daemon.metrics_url).of("nv_inference_request_success", "model")
    client.load_model("scale")
    client.infer("scale", [in_body(httpclient, values)])
    assert settled(daemon, client)[0].model("nv_inference_request_success", "scale") == 1


def test_what_is_compiled(daemon: DaemonProcess, client: Any) -> None:
    """
    1. A request of a shape that no program was made for, twice.
    Result: one compilation more, and its time; what workers made at load is compiled or from the cache. All states are shown.
    """
    compiles, hits = "tensord_worker_compiles_total", "tensord_worker_compile_cache_hits_total"

    def made(samples: Samples, *names: str) -> float:
        return sum(value for name in names for value in samples.of(name, "worker").values())

    before, _ = settled(daemon, client)
    # "scale" and "lengths" have several programs each, on two workers that share a cache.
    assert made(before, compiles, hits) >= 8
    for _ in range(2):
        client.infer("echo_fp32", [in_body(httpclient, np.zeros(37, np.float32))])
    after, _ = settled(daemon, client)
    assert 1 <= made(after, compiles) - made(before, compiles) <= 2
    seconds = "tensord_worker_compile_seconds_total"
    assert made(after, seconds) > made(before, seconds)
    states = {state: after.model("tensord_model_state", "scale", state=state) for state in ("READY", "UNAVAILABLE")}
    assert states == {"READY": 1, "UNAVAILABLE": 0}


def test_a_killed_worker(daemon: DaemonProcess, client: Any) -> None:
    """
    1. Requests, and a scrape. 2. kill -9 of one worker, and as soon as the other, requests all the time.
    Result: no scrape shows less than the one before, and the replacements' requests are added.
    """
    values = np.zeros((1, 4), np.float32)
    for _ in range(8):
        client.infer("scale", [in_body(httpclient, values)])
    samples, _ = settled(daemon, client)
    last = samples.model("nv_inference_request_success", "scale")
    restarts = sum(samples.of("tensord_worker_restarts_total", "worker").values())
    for worker in daemon.workers:
        worker.kill()
        restarts += 1

        def replaced(restarts: float = restarts) -> bool:
            nonlocal last
            client.infer("scale", [in_body(httpclient, values)])
            samples = scrape(daemon.metrics_url)
            now = samples.model("nv_inference_request_success", "scale")
            assert now >= last
            last = now
            up = sum(samples.of("tensord_worker_up", "worker").values())
            return up == 2 and sum(samples.of("tensord_worker_restarts_total", "worker").values()) == restarts

        wait_until(replaced, "the replacement", daemon)
    before, _ = settled(daemon, client)
    client.infer("scale", [in_body(httpclient, values)])
    after, _ = settled(daemon, client)
    success = "nv_inference_request_success"
    assert after.model(success, "scale") == before.model(success, "scale") + 1


def test_scrapers_that_hang_or_send_rubbish(daemon: DaemonProcess, client: Any) -> None:
    """
    1. Many connect: silent ones, some with half a request, some with rubbish, some that never read their answer.
    Result: every request is answered meanwhile, and so is every other scrape.
    """
    host, port = daemon.metrics_url.split(":")
    values = np.zeros((1, 4), np.float32)
    with contextlib.ExitStack() as stack:
        for content in (b"", b"GET /metrics HT", b"\x00\xff" * 9000, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") * 20:
            bad = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            with contextlib.suppress(ConnectionError):  # refused already
                bad.sendall(content)
            client.infer("scale", [in_body(httpclient, values)])
        assert scrape(daemon.metrics_url).model("nv_inference_request_success", "scale") >= 80
        assert client.is_server_ready()


def test_other_paths_and_methods(daemon: DaemonProcess) -> None:
    for path, method, status in (("/metrics", "POST", 405), ("/v2", "GET", 404)):
        asked = urllib.request.Request(f"http://{daemon.metrics_url}{path}", method=method)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=PATIENCE)
        with refused.value as answer:
            assert answer.code == status


def test_with_grpc_alone(tmp_path: Path, leaves_nothing: None) -> None:
    repository = repositories.scale_model(tmp_path / "repository")
    daemon = DaemonProcess(tmp_path, [repository], {"http": {"enabled": False}})
    daemon.served_on = "ready: "
    with daemon, grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        client.infer("scale", [in_body(grpcclient, np.zeros((1, 4), np.float32))])
        wait_until(
            lambda: scrape(daemon.metrics_url).model("nv_inference_request_success", "scale") == 1,
            "the request",
            daemon,
        )
        assert scrape(daemon.metrics_url).of("tensord_front_up", "front") == {"grpc-0": 1}


@pytest.mark.parametrize(
    ("model", "shape", "rows", "elements"),
    [
        # Batches of 1, 2, 4 and 8, requests of one kind again and again: the short way counts as the long one does.
        ("scale", (3, 4), 1, 4),
        ("scale", (5, 4), 3, 12),
        ("scale", (8, 4), 0, 0),
        ("lengths", (1, 3), 0, 1),
        ("lengths", (3, 5), 1, 4 * 16 - 15),
    ],
)
def test_what_was_computed_for_nobody(
    daemon: DaemonProcess, client: Any, model: str, shape: tuple[int, int], rows: int, elements: int
) -> None:
    def counted() -> tuple[int, int]:
        (entry,) = client.get_inference_statistics(model)["model_stats"]
        return entry["padded_rows"], entry["padded_elements"]

    before, count = counted(), 40
    for _ in range(count):
        client.infer(model, [in_body(httpclient, np.ones(shape, np.float32))])
    wanted = (before[0] + count * rows, before[1] + count * elements)
    wait_until(lambda: counted() == wanted, f"{wanted}, after {before}", daemon)
