"""Every answer is counted under its code; the access log has one good one in so many, and refusals up to a rate."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tensord.daemon.control.refusals import Refusals
from tensord.daemon.control.shared_counters import CODES, SharedCounters
from tensord.daemon.front import answered
from tensord.daemon.front.answered import Answered
from tensord.daemon.submit.in_flight import InFlight
from tensord.shm import access_log
from tensord.shm.messages import RequestRecord, Slice
from tensord.shm.seldom import LineRate


class Asked(InFlight):
    """A request in flight with fixed names."""

    model: str = "m"
    client_id: str = "7"

    @property
    def names(self) -> tuple[str, str]:
        return self.model, self.client_id


@pytest.fixture
async def page() -> AsyncIterator[SharedCounters]:
    made = SharedCounters.create()
    yield made
    made.close()


def of(page: SharedCounters, access: int = 0, protocol: str = "http", row: int = 3) -> Answered:
    return Answered(page.front(row), Refusals(lambda refusal: None), protocol, access)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.message) for record in caplog.records if record.name == "tensord.access"]


def asked(number: int = 1, **more: Any) -> Asked:
    contents = b"1234", Slice(0, 0, 60)
    return Asked(record=RequestRecord(number, 1, contents, received_ns=time.monotonic_ns() - 5_000_000), **more)


@pytest.mark.parametrize("protocol", CODES)
async def test_counted_by_code(page: SharedCounters, protocol: str) -> None:
    """Rows are apart, and no code is another's."""
    made, other = of(page, protocol=protocol), of(page, protocol=protocol, row=4)
    made.good(asked(), 1, b"")
    made.good(asked(), 1, [b""])
    codes = CODES[protocol]
    for count, code in enumerate(codes[1:-1], 2):
        for _ in range(count):
            made.failed(code, "no")
    made.failed("something new", "no")
    made.managed(codes[0])
    other.managed("304")
    assert list(page.counts(3, protocol).answers.values()) == [3, *range(2, len(codes)), 1]
    assert page.counts(4, protocol).answers == dict.fromkeys(codes, 0) | {"other": 1}
    # Of who dies only what grows stays.
    page.clear(3)
    assert page.counts(3, protocol).answers[codes[0]] == 3
    assert page.connections(4) == page.connections(3) == 0
    assert set(page.counts(4, protocol).refused.values()) == {0}


async def test_one_good_answer_in_so_many(page: SharedCounters, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = of(page, 3)
    for number in range(1, 8):
        made.good(asked(number, client_id=str(number)), 2, [b"abc", memoryview(b"de")])
        for _ in range(5):
            made.managed("200")  # such as of probes
    lines = access_lines(caplog)
    assert [line["id"] for line in lines] == ["3", "6"]
    (first, _) = lines
    assert 5000 <= first.pop("duration_us") < 60_000_000
    assert first == {
        "protocol": "http",
        "code": "200",
        "model": "m",
        "version": 2,
        "id": "3",
        "input_bytes": 64,
        "answer_bytes": 5,
    }
    # Another rate begins now; none is none.
    made.log_every(2)
    for _ in range(2):
        made.good(asked(client_id="x"), 2, b"")
    made.log_every(0)
    for _ in range(10):
        made.good(asked(), 2, b"")
        made.failed("400", "no", asked())
    assert [line["id"] for line in access_lines(caplog)] == ["3", "6", "x"]


async def test_refusals_are_logged_up_to_a_rate(
    page: SharedCounters, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. Thirty refusals within a second. 2. One more in another second.
    Result: ten lines, and one that says how many were left out.
    """
    caplog.set_level(logging.INFO)
    now = [10**12]
    monkeypatch.setattr(access_log, "LineRate", functools.partial(LineRate, clock=lambda: now[0]))
    made = of(page, 1000)
    for _ in range(30):
        made.failed("503", "full", Asked(client_id="y"))
    now[0] += 10**9
    made.failed("404", "\n" + 1000 * "x")
    lines = access_lines(caplog)
    assert len(lines) == 11
    assert lines[0] == {"protocol": "http", "code": "503", "model": "m", "version": 0, "id": "y", "error": "full"}
    assert lines[-1] == {"protocol": "http", "code": "404", "error": "\n" + 299 * "x", "left_out": 20}
    assert page.counts(3, "http").answers["503"] == 30


async def test_mistakes_of_clients_are_one_line(page: SharedCounters, caplog: pytest.LogCaptureFixture) -> None:
    """Without an access log as well, with the text of the first; what the server lacked is told elsewhere."""
    refusals = Refusals(lambda refusal: None)
    made = Answered(page.front(0), refusals, "grpc")
    for _ in range(3):
        made.failed("INVALID_ARGUMENT", "expected 3 inputs", asked())
    made.failed("UNIMPLEMENTED", "Method not found")
    made.failed("UNAVAILABLE", "full", asked())
    made.failed("CANCELLED", "gone", asked())
    refusals.close()
    assert [record.message for record in caplog.records] == [
        "refused as mistakes of clients in the last 1 s: 3 for model 'm' (INVALID_ARGUMENT), 1 (UNIMPLEMENTED); "
        "the first: expected 3 inputs"
    ]


async def test_recent_errors_are_bounded(page: SharedCounters) -> None:
    """In number, and each in its texts; and what a request holds is not kept with them."""
    made = of(page)
    request = asked(
        model="m" * 1000, client_id="i" * 1000, context=("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")
    )
    for number in range(answered._MAX_RECENT + 50):
        made.failed("400", f"{number} " + "e" * 1000, request)
        made.good(asked(), 1, b"")
    made.failed("404", "nowhere")
    found = made.recent()
    assert len(found) == answered._MAX_RECENT
    assert [str(row["error"]).split()[0] for row in found[:2]] == ["51", "52"]
    assert max(len(str(row[name])) for row in found for name in ("error", "model", "id")) == answered.MAX_TEXT
    assert (found[0]["code"], found[0]["protocol"], found[0]["trace_id"]) == (
        "400",
        "http",
        "4bf92f3577b34da6a3ce929d0e0e4736",
    )
    assert {**found[-1], "time": 0.0} == {
        "protocol": "http",
        "time": 0.0,
        "code": "404",
        "error": "nowhere",
        "model": "",
        "id": "",
        "client": "",
        "trace_id": "",
    }
