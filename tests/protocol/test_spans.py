"""Traces that join those of clients, over HTTP, gRPC and lanes: what a collector is sent, and entries of the trace file."""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensord_client
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
def daemon(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("spans")
    repositories.scale_model(folder / "models")
    step = ("scale", {"x": "x"}, {"y": "middle"}), ("scale", {"x": "middle"}, {"y": "y"})
    repositories.ensemble(folder / "models", "twice", ["x FP32 4"], ["y FP32 4"], list(step), 8)
    repositories.write_model(folder / "models", "talks", TALKS, CONFIG)
    repositories.write_model(folder / "models", "counts", COUNTS, "max_batch_size: 4 sequence_batching { }")
    trace = {"otlp": collector.url, "file": str(folder / "trace.json"), "level": ["TIMESTAMPS"], "rate": 1000000}
    options: dict[str, dict[str, Any]] = {
        "trace": trace,
        "clients": {"socket": str(folder / "clients.sock")},
        "log": {"access": 1, "format": "json"},
    }
    # Each of many tests waits for its spans.
    delay = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    with DaemonProcess(folder, [folder / "models"], options, environment=delay) as running:
        yield running


@pytest.fixture
def lane(daemon: DaemonProcess) -> Iterator[tensord_client.Client]:
    with tensord_client.connect(str(daemon.folder / "clients.sock")) as connected:
        yield connected


#: Sends a request to a model, whose input has a shape; headers or parameters beside it.
Ask = Callable[..., Any]


@pytest.fixture(params=["http", "grpc", "lane", "prepared"])
def ask(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[Ask]:
    """Yields a function that asks over one protocol, named ``protocol``; requests on a lane may be prepared."""
    with contextlib.ExitStack() as stack:
        if request.param in ("http", "grpc"):
            library = httpclient if request.param == "http" else grpcclient
            url = daemon.url if request.param == "http" else daemon.grpc_url
            client = stack.enter_context(library.InferenceServerClient(url))

            def ask(model: str, traceparent: str = "", shape: tuple[int, ...] = (1, 4), **own: Any) -> Any:
                x = library.InferInput("x", shape, "FP32")
                x.set_data_from_numpy(np.ones(shape, np.float32))
                headers = {"traceparent": traceparent} if traceparent else None
                return client.infer(model, [x], request_id="one", headers=headers, **own)

        else:
            lanes = stack.enter_context(tensord_client.connect(str(daemon.folder / "clients.sock")))

            def ask(model: str, traceparent: str = "", shape: tuple[int, ...] = (1, 4), **own: Any) -> Any:
                given, own = {"x": np.ones(shape, np.float32)}, {"request_id": "one", "traceparent": traceparent, **own}
                found = lanes.model(model)
                return found.prepare(given, **own)() if request.param == "prepared" else found(given, **own)

        ask.protocol = "lane" if request.param == "prepared" else request.param  # type: ignore[attr-defined]
        yield ask


def attributes(span: Any) -> dict[str, Any]:
    values = {each.key: each.value for each in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}


def new_id() -> str:
    return uuid.uuid4().hex


def test_a_sampled_parent_is_joined(daemon: DaemonProcess, collector: Collector, ask: Any) -> None:
    """However seldom requests are sampled otherwise, and also where requests like it were seen before."""
    is_lane, not_sampled = ask.protocol == "lane", new_id()
    for _ in range(1, 6):
        trace_id, began = new_id(), time.time_ns()
        ask("scale", SAMPLED % trace_id)
        ask("scale")
        ask("scale", UNSAMPLED % not_sampled)
        names = {"infer scale", "queue", "compute"} | (set() if is_lane else {"receive", "send"})
        spans = {span.name: span for span in collector.of(trace_id, len(names))}
        own = spans["infer scale"]
        assert set(spans) == names
        assert (own.parent_span_id.hex(), own.kind, own.status.code) == (PARENT, 2, 0)  # SERVER
        assert {span.parent_span_id for span in spans.values()} == {own.parent_span_id, own.span_id}
        said = attributes(own)
        assert (said["tensord.request_id"], said["tensord.version"]) == ("one", 1)
        code = "200" if ask.protocol == "http" else "OK"
        assert (said["tensord.protocol"], said["tensord.code"]) == (ask.protocol, code)
        assert "tensord.sequence_id" not in said
        assert began <= own.start_time_unix_nano <= spans["queue"].start_time_unix_nano
        assert spans["queue"].end_time_unix_nano == spans["compute"].start_time_unix_nano
        assert spans["compute"].end_time_unix_nano <= own.end_time_unix_nano <= time.time_ns()
    assert collector.services == {"tensord"}
    assert collector.resource["service.version"] == __version__
    assert collector.resource["host.name"] == socket.gethostname()
    assert not [span for span in collector.spans if span.trace_id.hex() == not_sampled]
    logged = [json.loads(line)["request"] for line in daemon.log.splitlines() if '"request":' in line]
    assert [line for line in logged if line.get("trace_id") == trace_id and line["protocol"] == ask.protocol]


def test_steps_of_an_ensemble_are_spans_of_it(collector: Collector, ask: Any) -> None:
    trace_id = new_id()
    ask("twice", SAMPLED % trace_id)
    spans = collector.of(trace_id, 9 if ask.protocol == "lane" else 11)
    (own,) = (span for span in spans if span.name == "infer twice")
    steps = [span for span in spans if span.name == "infer scale"]
    assert [step.parent_span_id for step in steps] == [own.span_id] * 2
    assert {span.parent_span_id for span in spans if span.name == "compute"} >= {step.span_id for step in steps}
    (queue,) = (span for span in spans if span.name == "queue" and span.parent_span_id == own.span_id)
    (run,) = (span for span in spans if span.name == "compute" and span.parent_span_id == own.span_id)
    assert queue.start_time_unix_nano <= queue.end_time_unix_nano == run.start_time_unix_nano


def test_a_span_says_of_which_sequence_it_is(collector: Collector, ask: Any) -> None:
    trace_id = new_id()
    ask("counts", SAMPLED % trace_id, sequence_id=77, sequence_start=True)
    (own,) = (span for span in collector.of(trace_id, 3) if span.name == "infer counts")
    said = attributes(own)
    assert [said[f"tensord.sequence_{name}"] for name in ("id", "start", "end")] == [77, True, False]


@pytest.mark.parametrize(("model", "shape"), [("scale", (1, 5)), ("nobody", (1, 4))])
def test_a_refused_request_is_a_span_with_its_error(
    collector: Collector, ask: Any, model: str, shape: tuple[int, ...]
) -> None:
    """Also for a model that is not there; a client with a lane knows that by itself."""
    trace_id = new_id()
    with pytest.raises((InferenceServerException, tensord_client.ServingError)) as refused:
        ask(model, SAMPLED % trace_id, shape)
    if model == "nobody" and ask.protocol == "lane":
        return
    (own,) = (span for span in collector.of(trace_id, 1) if span.name == f"infer {model}")
    said = refused.value.message() if ask.protocol != "lane" else refused.value.message
    assert (own.parent_span_id.hex(), own.status.code, own.status.message.startswith(said)) == (PARENT, 2, True)
    codes = {"scale": ("400", "INVALID_ARGUMENT"), "nobody": ("404", "NOT_FOUND")}
    assert attributes(own)["tensord.code"] == codes[model][ask.protocol != "http"]


def infer(daemon: DaemonProcess, library: Any, traceparent: str = "") -> Any:
    x = library.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.ones((1, 4), np.float32))
    with library.InferenceServerClient(daemon.url if library is httpclient else daemon.grpc_url) as client:
        return client.infer("scale", [x], headers={"traceparent": traceparent} if traceparent else None)


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
        assert infer(daemon, httpclient, traceparent).as_numpy("y").shape == (1, 4)
        infer(daemon, httpclient, SAMPLED % f"{number:032x}")
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
        infer(daemon, httpclient)
    wait_until(lambda: len(collector.spans) >= 15, "spans of three requests")
    spans = {"sent": 15.0, "failed": 0.0, "dropped": 0.0}
    wait_until(lambda: scrape(daemon.metrics_url).of("tensord_trace_spans_total", "outcome") == spans, "their count")
    with httpclient.InferenceServerClient(daemon.url) as asking:
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
        infer(daemon, httpclient)
        infer(daemon, grpcclient)
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log


# ------------------------------------------------------------------------------------------------- lanes alone


def set_traces(daemon: DaemonProcess, **settings: Any) -> None:
    status, body = daemon.request("POST", "/v2/trace/setting", json.dumps(settings).encode())[:2]
    assert status == 200, body


def entries(daemon: DaemonProcess) -> list[dict[str, Any]]:
    text = (daemon.folder / "trace.json").read_text()
    return json.loads(text) if text else []


@pytest.mark.parametrize(
    "malformed", ["nonsense", "00-0-0-01", f"00-{0:032x}-{1:016x}-01", "ff" + (SAMPLED % ("a" * 32))[2:]]
)
def test_a_malformed_parent_is_ignored(lane: Any, malformed: str) -> None:
    assert lane.model("scale")({"x": np.ones((1, 4), np.float32)}, traceparent=malformed)["y"].shape == (1, 4)
    with pytest.raises(tensord_client.InvalidArgument):
        lane.model("scale")({"x": np.ones((1, 4), np.float32)}, traceparent=5)


def test_the_file_has_one_in_so_many_and_no_more_than_wanted(daemon: DaemonProcess, lane: Any) -> None:
    """
    1. 60 calls, most of them answered outside of Python, with rate 10 and 4 traces wanted; 2. ten with a rate of 1 for this model
    alone; 3. ten with nothing traced.
    Result: four; ten; none. Each with the worker's timestamps, the client's id and a number of its own.
    """

    def has(before: set[int], count: int) -> bool:
        return len({entry["id"] for entry in entries(daemon)} - before) >= count

    model = lane.model("scale")
    for settings, calls, wanted in (
        ({"trace_rate": "10", "trace_count": "4"}, 60, 4),
        ({"trace_rate": "1", "trace_count": "-1"}, 10, 10),
        ({"trace_level": ["OFF"]}, 10, 0),
    ):
        before = {entry["id"] for entry in entries(daemon)}
        set_traces(daemon, **settings)
        # The supervisor tells a worker both in this order.
        assert daemon.request("GET", "/v2/models/scale/stats")[0] == 200
        for _ in range(calls):
            model({"x": np.ones((1, 4), np.float32)}, request_id="mine")
        wait_until(partial(has, before, wanted), "traces", daemon)
        new = [entry for entry in entries(daemon) if entry["id"] not in before]
        assert len({entry["id"] for entry in new}) == wanted
        heads = [entry for entry in new if "model_name" in entry]
        assert [(head["model_name"], head["model_version"], head["request_id"]) for head in heads] == [
            ("scale", 1, "mine")
        ] * wanted
        for head in heads:
            stamps = [
                stamp["name"] for entry in new if entry["id"] == head["id"] for stamp in entry.get("timestamps", ())
            ]
            assert stamps == [
                *("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
                *("COMPUTE_END", "REQUEST_END"),
            ]
    set_traces(daemon, trace_level=["TIMESTAMPS"], trace_rate="1000000")
