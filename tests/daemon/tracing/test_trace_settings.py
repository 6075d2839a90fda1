"""Trace settings: what a client says, what follows for models, and what fronts are told."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from tensord.config.options import TraceOptions
from tensord.daemon.tracing.trace_settings import TraceSettings, parse
from tensord.shm.control_records import TraceChanged, TraceCleared
from tensord.shm.errors import InvalidArgument, Unsupported
from tensord.shm.operations import ChangeTrace
from tests.open_files import no_descriptors_left

FIRST = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "/t",
    "trace_mode": "triton",
}


@pytest.fixture
def published() -> list[Any]:
    return []


@pytest.fixture
def settings(published: list[Any]) -> Iterator[TraceSettings]:
    made = TraceSettings(
        TraceOptions(file="/t"), lambda name: name in ("a", "b"), lambda *record: published.append(record)
    )
    yield made
    made.close()


def change(settings: TraceSettings, model: str = "", **given: list[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(settings.change(parse(model, given)))
    return answer


def test_names_order_and_types(settings: TraceSettings, published: list[Any]) -> None:
    assert list(change(settings).items()) == list(FIRST.items())
    assert change(settings, "a") == FIRST
    assert published == []
    with pytest.raises(InvalidArgument, match=r"Request for unknown model : nope$"):
        change(settings, "nope")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ChangeTrace()),
        ({"trace_level": ["TIMESTAMPS", "TENSORS", "FOO"]}, ChangeTrace(level=3)),
        ({"trace_level": ["OFF"]}, ChangeTrace(level=0)),
        ({"trace_level": ["FOO"], "foo": ["1"]}, ChangeTrace()),
        ({"trace_level": [], "trace_rate": []}, ChangeTrace(cleared=("level", "rate"))),
        ({"trace_rate": [" 5"], "trace_count": ["-1"]}, ChangeTrace(rate=5, count=-1)),
        ({"log_frequency": ["4294967295"]}, ChangeTrace(log_frequency=2**32 - 1)),
    ],
)
def test_what_is_understood(given: dict[str, list[str]], wanted: ChangeTrace) -> None:
    assert parse("", given) == wanted


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": ["x"]}, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": [""]}, "Unable to parse 'trace_rate', got: "),
        ({"trace_rate": ["-1"]}, "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: -1"),
        ({"trace_rate": ["5", "6"]}, "expect only 1 value for 'trace_rate'"),
        ({"trace_count": ["-2"]}, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        (
            {"trace_count": ["99999999999"]},
            "Unable to parse 'trace_count', value is out of range [ -1, 2147483647 ], got: 99999999999",
        ),
        ({"log_frequency": ["1" * 50]}, "Unable to parse 'log_frequency', got: " + "1" * 50),
    ],
)
def test_what_is_not(given: dict[str, list[str]], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse("", given)
    assert caught.value.message == text


def test_no_path_comes_from_a_client() -> None:
    with pytest.raises(Unsupported, match="trace file location can not be updated through network protocol"):
        parse("", {"trace_file": [], "trace_rate": ["x"]})


def test_inheritance(settings: TraceSettings) -> None:
    change(settings, "a", trace_rate=["5"])
    assert change(settings)["trace_rate"] == "1000"
    change(settings, trace_rate=["7"], log_frequency=["3"])
    assert (change(settings, "a")["trace_rate"], change(settings, "a")["log_frequency"]) == ("5", "3")
    assert change(settings, "b") == change(settings) == FIRST | {"trace_rate": "7", "log_frequency": "3"}
    assert change(settings, "a", trace_rate=[]) == change(settings)
    assert change(settings, trace_rate=[], log_frequency=[]) == FIRST


def test_all_or_nothing(published: list[Any]) -> None:
    """A model's rate of 0 is fine while nothing is traced, and no more when all models shall be."""
    settings = TraceSettings(TraceOptions(file="/t"), lambda _: True, lambda *record: published.append(record))
    change(settings, "a", trace_rate=["0"])
    published.clear()
    with pytest.raises(InvalidArgument, match="sample rate must be non-zero"):
        change(settings, trace_level=["TIMESTAMPS"], trace_count=["5"])
    assert (published, change(settings)) == ([], FIRST)
    settings.close()


def test_nothing_is_traced_without_a_file(published: list[Any]) -> None:
    settings = TraceSettings(TraceOptions(), lambda _: True, lambda *record: published.append(record))
    for model in ("", "a"):
        with pytest.raises(InvalidArgument) as caught:
            change(settings, model, trace_level=["TIMESTAMPS"])
        assert caught.value.message == "Attempting to set invalid trace setting :trace file name is not given"
    assert published == []
    settings.close()


@pytest.mark.parametrize("left", [0, 1])
def test_nothing_changes_without_descriptors(settings: TraceSettings, published: list[Any], left: int) -> None:
    """Nor is one of the two counters left behind, of which only the first can be made."""
    before = change(settings, "a", trace_rate=["5"])
    published.clear()
    there = os.listdir("/proc/self/fd")
    with no_descriptors_left() as limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit + left, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with pytest.raises(OSError, match="Too many open files"):
            change(settings, trace_level=["TENSORS"], trace_count=["3"])
    assert (change(settings), change(settings, "a"), published) == (FIRST, before, [])
    assert os.listdir("/proc/self/fd") == there


def test_what_fronts_are_told(settings: TraceSettings, published: list[Any]) -> None:
    change(settings, "a", trace_level=["TENSORS"], trace_rate=["1"])
    record, turn = published.pop()
    assert (record, os.readlink(f"/proc/self/fd/{turn}")) == (TraceChanged("a", 2, 1, 0, "/t"), "anon_inode:[eventfd]")
    change(settings, trace_count=["3"])
    # Both follow: the model has no count of its own. Where nothing is traced there is nothing to count.
    assert {record.model: len(counters) for record, *counters in published} == {"": 0, "a": 2}
    published.clear()
    assert {record.model: len(counters) for record, *counters in settings.records()} == {"": 0, "a": 2}
    change(settings, "a", trace_level=[], trace_rate=[])
    assert published == [(TraceCleared("a"),)]
