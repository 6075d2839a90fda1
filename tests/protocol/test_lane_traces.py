"""Requests on clients' lanes are traced as those over HTTP and gRPC: spans at a collector, and entries of the trace file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensord_client

from tests import repositories
from tests.collector import Collector
from tests.daemon_process import DaemonProcess, wait_until
from tests.protocol.test_spans import COUNTS, PARENT, SAMPLED, UNSAMPLED

X = {"x": np.ones((1, 4), np.float32)}


@pytest.fixture(scope="module")
def collector(leaves_nothing: None) -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def daemon(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("lanes")
    repositories.scale_model(folder / "models")
    step = ("scale", {"x": "x"}, {"y": "middle"}), ("scale", {"x": "middle"}, {"y": "y"})
    repositories.ensemble(folder / "models", "twice", ["x FP32 4"], ["y FP32 4"], list(step), 8)
    repositories.write_model(folder / "models", "counts", COUNTS, "max_batch_size: 4 sequence_batching { }")
    (folder / "daemon").mkdir()
    options: dict[str, dict[str, Any]] = {
        "trace": {"otlp": collector.url, "file": str(folder / "trace.json"), "level": ["TIMESTAMPS"], "rate": 1000000},
        "clients": {"socket": str(folder / "clients.sock")},
        "log": {"access": 1, "format": "json"},
    }
    with DaemonProcess(folder / "daemon", [folder / "models"], options) as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Any]:
    with tensord_client.connect(str(Path(daemon.folder).parent / "clients.sock")) as connected:
        yield connected


def set_traces(daemon: DaemonProcess, **settings: Any) -> None:
    status, body = daemon.request("POST", "/v2/trace/setting", json.dumps(settings).encode())[:2]
    assert status == 200, body


def entries(daemon: DaemonProcess) -> list[dict[str, Any]]:
    text = (Path(daemon.folder).parent / "trace.json").read_text()
    return json.loads(text) if text else []


@pytest.mark.parametrize("prepared", [False, True])
def test_a_sampled_parent_is_joined(daemon: DaemonProcess, collector: Collector, client: Any, prepared: bool) -> None:
    """However seldom requests are sampled otherwise, and also where requests like it are answered outside of Python."""
    model = client.model("scale")
    for number in range(1, 6):
        trace_id = f"{number:031x}{int(prepared):x}"
        began = time.time_ns()
        own = {"traceparent": SAMPLED % trace_id, "request_id": "one"}
        answer = model.prepare(X, **own)() if prepared else model(X, **own)
        assert answer["y"].shape == (1, 4)
        model(X)
        model(X, traceparent=UNSAMPLED % f"{number:031x}f")
        spans = {span.name: span for span in collector.of(trace_id, 3)}
        assert set(spans) == {"infer scale", "queue", "compute"}
        request = spans["infer scale"]
        assert (request.parent_span_id.hex(), request.kind) == (PARENT, 2)
        assert {span.parent_span_id for span in spans.values()} == {request.parent_span_id, request.span_id}
        said = {each.key: each.value for each in request.attributes}
        assert (said["tensord.protocol"].string_value, said["tensord.code"].string_value) == ("lane", "OK")
        assert (said["tensord.request_id"].string_value, said["tensord.version"].int_value) == ("one", 1)
        assert began <= request.start_time_unix_nano <= spans["queue"].start_time_unix_nano
        assert spans["queue"].end_time_unix_nano == spans["compute"].start_time_unix_nano
        assert spans["compute"].end_time_unix_nano <= request.end_time_unix_nano <= time.time_ns()
    assert not [span for span in collector.spans if span.trace_id.hex().endswith("f")]
    logged = [json.loads(line)["request"] for line in daemon.log.splitlines() if '"request":' in line]
    assert [line for line in logged if line.get("trace_id") == trace_id and line["protocol"] == "lane"]


def test_steps_and_sequences(collector: Collector, client: Any) -> None:
    client.model("twice")(X, traceparent=SAMPLED % f"a{1:031x}")
    names = sorted(span.name for span in collector.of(f"a{1:031x}", 9))
    assert (names.count("infer scale"), names.count("infer twice")) == (2, 1)
    client.model("counts")(X, traceparent=SAMPLED % f"b{1:031x}", sequence_id=7, sequence_start=True, sequence_end=True)
    (own,) = (span for span in collector.of(f"b{1:031x}", 3) if span.name == "infer counts")
    said = {each.key: each.value for each in own.attributes}
    assert said["tensord.sequence_id"].int_value == 7
    assert said["tensord.sequence_start"].bool_value
    assert said["tensord.sequence_end"].bool_value


def test_what_is_refused_is_a_span_with_the_error(collector: Collector, client: Any) -> None:
    with pytest.raises(tensord_client.InvalidArgument):
        client.model("scale")({"x": np.ones((1, 5), np.float32)}, traceparent=SAMPLED % f"c{1:031x}")
    (own,) = collector.of(f"c{1:031x}", 1)
    assert (own.name, own.status.code) == ("infer scale", 2)
    assert {each.key: each.value for each in own.attributes}["tensord.code"].string_value == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "malformed", ["nonsense", "00-0-0-01", f"00-{0:032x}-{1:016x}-01", "ff" + (SAMPLED % ("a" * 32))[2:]]
)
def test_a_malformed_parent_is_ignored(client: Any, malformed: str) -> None:
    assert client.model("scale")(X, traceparent=malformed)["y"].shape == (1, 4)
    with pytest.raises(tensord_client.InvalidArgument):
        client.model("scale")(X, traceparent=5)


def test_the_file_has_one_in_so_many_and_no_more_than_wanted(daemon: DaemonProcess, client: Any) -> None:
    """
    1. 60 calls, most of them answered outside of Python, with rate 10 and 4 traces wanted; 2. ten with a rate of 1 for this model
    alone; 3. ten with nothing traced.
    Result: four; ten; none. Each with the worker's timestamps, the client's id and a number of its own.
    """

    def has(before: set[int], count: int) -> bool:
        return len({entry["id"] for entry in entries(daemon)} - before) >= count

    model = client.model("scale")
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
            model(X, request_id="mine")
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
