"""Sampling in a front: which requests, whose settings, and when a file gets them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tensord.shm.control_records import TraceChanged, TraceCleared
from tensord.shm.messages import OwnSpan, Timeline
from tensord.shm.trace_counters import SampleCounter, TraceBudget
from tensord.shm.trace_file import TraceFiles
from tensord.shm.tracer import Tracer


def test_rate_count_and_inheritance(tmp_path: Path) -> None:
    tracer = Tracer(7, TraceFiles(1 << 20, 1000))
    assert not tracer.on
    turn, budget = SampleCounter.create(3), TraceBudget.create(2)
    tracer.changed(TraceChanged("", 1, 3, 0, str(tmp_path / "t")), [os.dup(turn.fd), os.dup(budget.fd)])
    tracer.changed(TraceChanged("off", 0, 1, 0, str(tmp_path / "t")), [])
    assert tracer.on
    hits = [number for number in range(1, 13) if tracer.sample("m") is not None]
    assert (hits, budget.remaining()) == ([3, 6], 0)
    assert all(tracer.sample("off") is None for _ in range(5))
    tracer.changed(TraceChanged("", 0, 3, 0, ""), [])
    assert not tracer.on
    tracer.changed(TraceChanged("off", 1, 1, 0, str(tmp_path / "t")), [SampleCounter.create(1).fd])
    assert tracer.on
    assert tracer.sample("off") is not None
    tracer.cleared(TraceCleared("off"))
    assert (tracer.on, tracer.sample("off")) == (False, None)
    tracer.close()
    turn.close()
    budget.close()


def test_a_trace_says_which_parameters_its_request_was_computed_with(tmp_path: Path) -> None:
    """A trace names the set where one was pushed, also for requests that were made for its request."""
    tracer = Tracer(7, TraceFiles(1 << 20, 1000))
    tracer.changed(TraceChanged("", 1, 1, 0, str(tmp_path / "t")), [SampleCounter.create(1).fd])
    trace = tracer.sample("m")
    assert trace is not None
    child = Timeline((), model="n", version=2, parameters=("customer-7", 3))
    trace.completed(4, Timeline((), children=(child, Timeline((), model="o", version=1)), parameters=("main", 17)))
    trace.end()
    tracer.close()
    heads = [entry for entry in json.loads((tmp_path / "t").read_text()) if "model_name" in entry]
    said = [(head["model_name"], head.get("parameter_set"), head.get("parameter_version")) for head in heads]
    assert said == [("m", "main", 17), ("n", "customer-7", 3), ("o", None, None)]


def test_a_trace_that_ends_after_its_settings_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t"
    tracer = Tracer(7, TraceFiles(1 << 20, 1000))
    tracer.changed(TraceChanged("", 1, 1, 2, str(path)), [SampleCounter.create(1).fd])
    first, second = tracer.sample("m"), tracer.sample("m")
    assert first is not None
    assert second is not None
    first.stamp("HTTP_RECV_START")
    first.completed(4, Timeline((("QUEUE_START", 5),)))
    first.end()
    tracer.changed(TraceChanged("", 0, 1, 0, str(path)), [])
    second.end()
    tracer.close()
    files = [json.loads((tmp_path / f"t.{index}").read_text()) for index in range(2)]
    assert files[0][0] == {"id": (7 << 32) + 1, "model_name": "m", "model_version": 4}
    assert [entry["timestamps"][0]["name"] for entry in files[0][1:]] == [
        "QUEUE_START",
        "HTTP_RECV_START",
        "REQUEST_END",
    ]
    assert files[1] == [{"id": (7 << 32) + 2, "model_name": "m", "model_version": -1}]


def test_what_a_model_has_named_is_in_the_file(tmp_path: Path) -> None:
    """A model's marks are moments of the request, in order, and the file carries the trace's number."""
    tracer = Tracer(7, TraceFiles(1 << 20, 1000))
    tracer.changed(TraceChanged("", 1, 1, 0, str(tmp_path / "t")), [SampleCounter.create(1).fd])
    trace = tracer.sample("m")
    assert trace is not None
    assert trace.context == (str((7 << 32) + 1), "")
    spans = (OwnSpan("outer", 5, 20), OwnSpan("inner", 6, 9, parent=1))
    trace.completed(4, Timeline((("QUEUE_START", 1),), spans=spans))
    trace.end()
    tracer.close()
    stamps = [entry["timestamps"][0] for entry in json.loads((tmp_path / "t").read_text()) if "timestamps" in entry]
    assert [(stamp["name"], stamp["ns"]) for stamp in stamps[:-1]] == [
        ("QUEUE_START", 1),
        ("outer_START", 5),
        ("inner_START", 6),
        ("inner_END", 9),
        ("outer_END", 20),
    ]
