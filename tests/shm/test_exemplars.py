"""Exemplars of a front: the last of each bucket, of so many model versions."""

from __future__ import annotations

import json

import msgspec

from tensord.shm import tracer
from tensord.shm.durations import COMPUTE, FIRST_RESPONSE, QUEUE, REQUEST
from tensord.shm.tracer import Exemplars

MS = 10**6


def moments(queue_ms: int, compute_ms: int) -> dict[str, int]:
    began = 1000 * MS
    run = began + queue_ms * MS
    return {"REQUEST_START": began, "COMPUTE_START": run, "COMPUTE_END": run + compute_ms * MS}


def told(made: Exemplars) -> list[tuple[str, int, dict[tuple[int, int], tuple[str, float]]]]:
    """Returns the exemplars after they were encoded and decoded, as another process gets them."""
    found = json.loads(msgspec.json.encode(made.told()))
    return [
        (model, version, {(kind, bucket): (trace_id, seconds) for kind, bucket, trace_id, seconds, _ in rows})
        for model, version, rows in found
    ]


def test_the_last_of_each_bucket() -> None:
    made = Exemplars([0.01, 0.1])
    made.note("m", 1, "a", moments(5, 50))
    made.note("m", 1, "b", moments(5, 5))
    made.note("m", 2, "c", moments(0, 500))
    assert told(made) == [
        (
            "m",
            1,
            {
                (REQUEST, 1): ("a", 0.055),
                (QUEUE, 0): ("b", 0.005),
                (COMPUTE, 1): ("a", 0.05),
                (REQUEST, 0): ("b", 0.01),
                (COMPUTE, 0): ("b", 0.005),
            },
        ),
        ("m", 2, {(REQUEST, 2): ("c", 0.5), (QUEUE, 0): ("c", 0.0), (COMPUTE, 2): ("c", 0.5)}),
    ]


def test_a_first_response() -> None:
    made = Exemplars([0.01, 0.1])
    made.note("m", 1, "a", {"REQUEST_START": 7 * MS, "RESPONSE_START": 27 * MS})
    assert told(made) == [("m", 1, {(FIRST_RESPONSE, 1): ("a", 0.02)})]


def test_what_did_not_run_has_no_durations() -> None:
    made = Exemplars([0.01])
    made.note("m", 1, "a", {"REQUEST_START": 5})
    assert told(made) == [("m", 1, {})]


def test_a_bounded_number_of_versions() -> None:
    made = Exemplars([0.01])
    for number in range(tracer.MAX_EXEMPLARS + 10):
        made.note("m", number, "a", moments(1, 1))
        made.note("kept", 1, "a", moments(1, 1))
    found = [(model, version) for model, version, _ in told(made)]
    assert len(found) == tracer.MAX_EXEMPLARS
    assert ("kept", 1) in found
    assert ("m", 0) not in found
