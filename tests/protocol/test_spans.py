"""Traces that join those of clients: what a collector is sent, decoded from OTLP's own protobufs."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tensord import __version__
from tests import repositories
from tests.collector import Collector
from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.protocol.streaming_models import CONFIG, TALKS
from tests.scrapes import scrape

COUNTS = """
    inputs = {"x": "FP32[4]"}
    outputs = {"y": "FP32[4]"}
    state = {"sum": "FP32[4]"}

    def create(path, config, device):
        def apply(params, inputs, state):
            return {"y": inputs["x"] + state["sum"]}, {"sum": inputs["x"] + state["sum"]}
        return apply, {}
"""
SAMPLED, UNSAMPLED = "00-%s-00f067aa0ba902b7-01", "00-%s-00f067aa0ba902b7-00"
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector(leaves_nothing: None) -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def daemon(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("spans")
    repositories.scale_model(folder / "models")
    step = ("scale", {"x": "x"}, {"y": "middle"}), ("scale", {"x": "middle"}, {"y": "y"})
    repositories.ensemble(folder / "models", "twice", ["x FP32 4"], ["y FP32 4"], list(step), 8)
    repositories.write_model(folder / "models", "talks", TALKS, CONFIG)
    repositories.write_model(folder / "models", "counts", COUNTS, "max_batch_size: 4 sequence_batching { }")
    (folder / "daemon").mkdir()
    options: dict[str, dict[str, Any]] = {"trace": {"otlp": collector.url, "rate": 1000000}}
    with DaemonProcess(folder / "daemon", [folder / "models"], options) as running:
        yield running


def client(daemon: DaemonProcess, kind: Any) -> Any:
    return kind.InferenceServerClient(daemon.url if kind is httpclient else daemon.grpc_url)


def infer(daemon: DaemonProcess, kind: Any, model: str, traceparent: str = "", shape: tuple[int, ...] = (1, 4)) -> Any:
    x = kind.InferInput("x", shape, "FP32")
    x.set_data_from_numpy(np.ones(shape, np.float32))
    with client(daemon, kind) as asking:
        return asking.infer(model, [x], request_id="one", headers={"traceparent": traceparent} if traceparent else None)


KINDS = pytest.mark.parametrize("kind", [httpclient, grpcclient], ids=["http", "grpc"])


@KINDS
def test_a_sampled_parent_is_joined(daemon: DaemonProcess, collector: Collector, kind: Any) -> None:
    """However seldom requests are sampled otherwise, and also where requests like it were seen before."""
    for number in range(1, 5):
        trace_id = f"{number:031x}{int(kind is grpcclient):x}"
        began = time.time_ns()
        infer(daemon, kind, "scale", SAMPLED % trace_id)
        infer(daemon, kind, "scale")
        infer(daemon, kind, "scale", UNSAMPLED % f"{number:031x}f")
        spans = {span.name: span for span in collector.of(trace_id, 5)}
        own = spans["infer scale"]
        assert set(spans) == {"infer scale", "receive", "queue", "compute", "send"}
        assert (own.parent_span_id.hex(), own.kind) == (PARENT, 2)  # SERVER
        assert {span.parent_span_id for span in spans.values()} == {own.parent_span_id, own.span_id}
        said = {each.key: each.value for each in own.attributes}
        assert said["tensord.request_id"].string_value == "one"
        assert said["tensord.version"].int_value == 1
        assert (said["tensord.protocol"].string_value, said["tensord.code"].string_value) == (
            ("grpc", "OK") if kind is grpcclient else ("http", "200")
        )
        assert "tensord.sequence_id" not in said
        assert began <= own.start_time_unix_nano <= spans["queue"].start_time_unix_nano
        assert spans["queue"].end_time_unix_nano == spans["compute"].start_time_unix_nano
        assert spans["compute"].end_time_unix_nano <= own.end_time_unix_nano <= time.time_ns()
        assert own.status.code == 0
    assert collector.services == {"tensord"}
    assert collector.resource["service.version"] == __version__
    assert collector.resource["host.name"] == socket.gethostname()
    assert not [span for span in collector.spans if span.trace_id.hex().endswith("f")]


@KINDS
def test_steps_of_an_ensemble_are_spans_of_it(daemon: DaemonProcess, collector: Collector, kind: Any) -> None:
    trace_id = f"{7:031x}{int(kind is grpcclient):x}"
    infer(daemon, kind, "twice", SAMPLED % trace_id)
    spans = collector.of(trace_id, 7)
    (own,) = (span for span in spans if span.name == "infer twice")
    steps = [span for span in spans if span.name == "infer scale"]
    assert [step.parent_span_id for step in steps] == [own.span_id] * 2
    assert {span.parent_span_id for span in spans if span.name == "compute"} >= {step.span_id for step in steps}
    (queue,) = (span for span in spans if span.name == "queue" and span.parent_span_id == own.span_id)
    (run,) = (span for span in spans if span.name == "compute" and span.parent_span_id == own.span_id)
    assert queue.start_time_unix_nano <= queue.end_time_unix_nano == run.start_time_unix_nano


@KINDS
def test_a_span_says_of_which_sequence_it_is(daemon: DaemonProcess, collector: Collector, kind: Any) -> None:
    trace_id = f"{12:031x}{int(kind is grpcclient):x}"
    x = kind.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.ones((1, 4), np.float32))
    with client(daemon, kind) as asking:
        headers = {"traceparent": SAMPLED % trace_id}
        asking.infer("counts", [x], sequence_id=77, sequence_start=True, headers=headers)
    (own,) = (span for span in collector.of(trace_id, 5) if span.name == "infer counts")
    said = {each.key: each.value for each in own.attributes}
    assert said["tensord.sequence_id"].int_value == 77
    assert (said["tensord.sequence_start"].bool_value, said["tensord.sequence_end"].bool_value) == (True, False)


@KINDS
def test_a_refused_request_is_a_span_with_its_error(daemon: DaemonProcess, collector: Collector, kind: Any) -> None:
    trace_id = f"{8:031x}{int(kind is grpcclient):x}"
    with pytest.raises(InferenceServerException) as refused:
        infer(daemon, kind, "scale", SAMPLED % trace_id, (1, 5))
    (own,) = (span for span in collector.of(trace_id, 1) if span.name == "infer scale")
    assert (own.status.code, own.status.message) == (2, refused.value.message())
    code = {each.key: each.value for each in own.attributes}["tensord.code"].string_value
    assert code == ("INVALID_ARGUMENT" if kind is grpcclient else "400")


@KINDS
def test_a_request_for_a_model_that_is_not_there_is_a_span_too(
    daemon: DaemonProcess, collector: Collector, kind: Any
) -> None:
    trace_id = f"{10:031x}{int(kind is grpcclient):x}"
    with pytest.raises(InferenceServerException) as refused:
        infer(daemon, kind, "nobody", SAMPLED % trace_id)
    (own,) = (span for span in collector.of(trace_id, 1) if span.name == "infer nobody")
    assert (own.parent_span_id.hex(), own.status.code, own.status.message) == (PARENT, 2, refused.value.message())


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_a_generation_by_a_model_that_is_not_there_is_a_span_too(
    daemon: DaemonProcess, collector: Collector, path: str
) -> None:
    trace_id = f"{11:031x}{len(path) % 16:x}"
    asked = urllib.request.Request(
        f"http://{daemon.url}/v2/models/nobody/{path}", b"{}", {"traceparent": SAMPLED % trace_id}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=PATIENCE)
    refused.value.close()
    (own,) = (span for span in collector.of(trace_id, 1) if span.name == "infer nobody")
    assert own.status.code == 2


def test_a_first_response_has_an_exemplar(daemon: DaemonProcess, collector: Collector) -> None:
    trace_id = f"{9:032x}"
    asked = urllib.request.Request(
        f"http://{daemon.url}/v2/models/talks/generate_stream", b'{"n": 3}', {"traceparent": SAMPLED % trace_id}
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
        content = answer.read()
    assert content.count(b"data:") >= 3, content
    collector.of(trace_id, 4)
    url, accept = f"http://{daemon.metrics_url}/metrics", {"Accept": "application/openmetrics-text"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=accept), timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    assert [line for line in lines if "first_response_duration" in line and f'trace_id="{trace_id}"' in line]


def test_a_malformed_parent_is_none(daemon: DaemonProcess, collector: Collector) -> None:
    """Such requests are answered, and begin no trace: the one behind them is the next that comes."""
    malformed = [
        "00",
        "zz" * 30,
        SAMPLED % ("0" * 32),
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
        "\t",
        "00-1-1-01" * 100,
    ]
    for number, traceparent in enumerate(malformed, 100):
        assert infer(daemon, httpclient, "scale", traceparent).as_numpy("y").shape == (1, 4)
        infer(daemon, httpclient, "scale", SAMPLED % f"{number:032x}")
        collector.of(f"{number:032x}", 5)
    assert not [span for span in collector.spans if not span.parent_span_id]


def test_sampled_requests_begin_traces_of_their_own(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    """Without a file, by the rate and by clients' settings."""
    collector = Collector()
    repositories.scale_model(tmp_path / "models")
    trace = {"otlp": collector.url, "rate": 3, "level": ["TIMESTAMPS"]}
    daemon = start_daemon(tmp_path / "models", trace=trace, http={"processes": 1})
    daemon.wait_ready()
    for _ in range(9):
        infer(daemon, httpclient, "scale")
    wait_until(lambda: len(collector.spans) >= 15, "spans of three requests")
    spans = {"sent": 15.0, "failed": 0.0, "dropped": 0.0}
    wait_until(lambda: scrape(daemon.metrics_url).of("tensord_trace_spans_total", "outcome") == spans, "their count")
    with client(daemon, httpclient) as asking:
        assert asking.get_trace_settings()["trace_mode"] == "opentelemetry"
        asking.update_trace_settings(settings={"trace_level": ["OFF"]})
    assert daemon.stop() == 0
    roots = [span for span in collector.spans if span.name == "infer scale"]
    assert len({span.trace_id for span in roots}) == len(roots) == 3
    assert not any(span.parent_span_id for span in roots)
    collector.close()


def test_a_collector_that_is_gone_costs_nobody_anything(start_daemon: Callable[..., Any], tmp_path: Path) -> None:
    """Requests are answered, and the daemon stops as ever."""
    repositories.scale_model(tmp_path / "models")
    trace = {"otlp": "http://127.0.0.1:1/v1/traces", "rate": 1, "level": ["TIMESTAMPS"]}
    daemon = start_daemon(tmp_path / "models", trace=trace)
    daemon.wait_ready()
    for _ in range(50):
        infer(daemon, httpclient, "scale")
        infer(daemon, grpcclient, "scale")
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
