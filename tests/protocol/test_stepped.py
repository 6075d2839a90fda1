"""Stepped models as clients see them: many requests at a time, each with its own responses and one end, whatever happens."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.daemon_process import DaemonOf, DaemonProcess, wait_until
from tests.protocol.stepped_models import Steps, write_stepped_models

FAILED = "model 'counts' version 1 failed with "


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("stepped")
    write_stepped_models(folder / "models")
    sections = {"expert": {"max_ahead": 4096}, "repository": {"control_mode": "explicit", "load": ["*"]}}
    return daemon_of(folder / "models", sections, folder=folder)


@pytest.fixture
def steps(daemon: DaemonProcess) -> Iterator[Steps]:
    with Steps(daemon.grpc_url) as opened:
        yield opened


def statistics(daemon: DaemonProcess, model: str = "counts") -> dict[str, Any]:
    (found,) = json.loads(daemon.get(f"/v2/models/{model}/stats")[1])["model_stats"]
    assert isinstance(found, dict)
    return found


def generate(daemon: DaemonProcess, how: str, body: dict[str, Any]) -> tuple[int, str]:
    status, content = daemon.request("POST", f"/v2/models/counts/{how}", json.dumps(body).encode())
    return status, content.decode()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 30])
@pytest.mark.parametrize("early", [True, False])
def test_a_request_has_its_responses_and_one_end(steps: Steps, count: int, early: bool) -> None:
    assert steps.answers((2, 3), count=count, early=early) == [*range(5, 5 + count), None]


def test_requests_of_every_bucket_share_steps(steps: Steps, daemon: DaemonProcess) -> None:
    before = statistics(daemon)
    # The others are there when its first step ends, on a slow machine too.
    steps.ask("0", [554], count=20)
    for number in range(1, 20):
        steps.ask(str(number), [number] + [0] * (number % 16), count=20)
    for number, got in enumerate(steps.all_of(*map(str, range(20)))):
        first = number or 554
        assert got == [*range(first, first + 20), None]
    after = statistics(daemon)
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 20
    assert after["inference_count"] - before["inference_count"] == 20
    # One after the other they would have had 20 x 19.
    assert after["execution_count"] - before["execution_count"] < 250
    assert {each["batch_size"] for each in after["batch_stats"]} >= {4}


def test_many_that_end_as_they_begin(steps: Steps) -> None:
    for number in range(30):
        steps.ask(str(number), (number,), count=1)
    assert steps.all_of(*map(str, range(30))) == [[number, None] for number in range(30)]


def test_several_requests_are_inserted_by_one_call(steps: Steps) -> None:
    for number in range(11):
        steps.ask(str(number), [number, 1, 1][: 1 + number % 3], "rows", count=1 + number)
    for number, got in enumerate(steps.all_of(*map(str, range(11)))):
        length = 1 + number % 3
        first = (number + length - 1) * length
        assert got == [*range(first, first + 1 + number), None]


def test_a_row_need_not_be_a_response(steps: Steps) -> None:
    assert steps.answers((3,), count=8, every=3, early=False) == [3, 6, 9, None]


def test_a_request_that_does_not_end_is_ended(steps: Steps) -> None:
    assert steps.answers((0,), ends=False) == [*range(41), None]


def test_a_stream_of_events(daemon: DaemonProcess) -> None:
    status, text = generate(daemon, "generate_stream", {"start": [1, 2], "count": 3})
    events = [json.loads(line[5:]) for line in text.splitlines() if line]
    assert status == 200
    assert [(event["y"], event["half"]) for event in events] == [(3, [1.5, 2.0]), (4, [2.0, 2.0]), (5, [2.5, 2.0])]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_all_responses_in_one(daemon: DaemonProcess, count: int) -> None:
    status, text = generate(daemon, "generate", {"start": [7], "count": count})
    answer = json.loads(text)
    assert status == 200
    numbers = list(range(7, 7 + count))
    # One element is no list in this protocol.
    assert answer["y"] == (numbers if count != 1 else 7)
    assert answer["half"] == [half for number in numbers for half in (number / 2, 1.0)]


def test_all_responses_in_one_of_what_fails(daemon: DaemonProcess) -> None:
    status, text = generate(daemon, "generate", {"start": [660], "count": 30})
    assert (status, FAILED in text) == (400, True)


def test_a_step_of_an_ensemble(steps: Steps) -> None:
    for number in range(6):
        steps.ask(str(number), (number,), "whole")
    assert steps.all_of(*map(str, range(6))) == [[number, number + 1, number + 2, None] for number in range(6)]


def test_what_a_client_says_wrong_is_told(steps: Steps, daemon: DaemonProcess) -> None:
    assert steps.answers([1] * 17) == [
        "model 'counts': axis 'length' of the request has size 17, the largest of its buckets is 16"
    ]
    status, text = generate(daemon, "generate_stream", {"start": [1], "count": "three"})
    assert (status, "INT32 is expected" in text) == (400, True)


def test_nan_is_a_number_like_any_other(steps: Steps, daemon: DaemonProcess) -> None:
    assert steps.answers((97,), count=5) == [97, 98, 99, 100, 101, None]
    events = generate(daemon, "generate_stream", {"start": [98], "count": 2})[1]
    assert math.isnan(json.loads(events.splitlines()[2][5:].replace("null", "NaN"))["half"][0])


def test_who_is_cancelled_leaves_its_slot(steps: Steps, daemon: DaemonProcess) -> None:
    """Four requests have all the slots and would keep them; whoever waits behind them gets theirs."""

    def failed() -> int:
        return int(statistics(daemon)["inference_stats"]["fail"]["count"])

    before = failed()

    def cancels_are_counted() -> bool:
        """It may come too late: when all that was taken by then has had its steps."""
        with Steps(daemon.grpc_url) as others:
            for number in range(4):
                # 40 steps a request are soon over, so each is a long row of them.
                for again in range(200):
                    others.ask(f"{number} {again}", ends=False)
            others.take()
            others.call.cancel()
        assert steps.answers((1,), count=2) == [1, 2, None]
        return failed() > before

    wait_until(cancels_are_counted, "cancels to be counted", daemon)


def test_a_step_that_fails_ends_all_that_have_a_slot(steps: Steps, daemon: DaemonProcess) -> None:
    for number in range(3):
        steps.ask(f"good {number}", (number,), ends=False, count=1)
    steps.ask("bad", (660,), count=30)
    for number in range(6):
        steps.ask(f"waits {number}", (number,), count=3)
    (bad,) = steps.all_of("bad")
    assert bad[:-1] == list(range(660, 660 + len(bad) - 1))
    assert bad[-1].startswith(FAILED)
    failed = 0
    for number, got in enumerate(steps.all_of(*(f"good {number}" for number in range(3)))):
        values = [value for value in got if isinstance(value, int)]
        assert values == list(range(number, number + len(values)))
        assert got[len(values) :] == [None] or got[len(values) :][0].startswith(FAILED)
        failed += got[-1] is not None
    for number, got in enumerate(steps.all_of(*(f"waits {number}" for number in range(6)))):
        if got != [*range(number, number + 3), None]:
            # It had the slot of one that had ended.
            assert got[-1].startswith(FAILED)
            failed += 1
    assert failed <= 3
    assert steps.answers((1,), count=2) == [1, 2, None]


def test_a_slow_client_holds_up_nobody(steps: Steps, daemon: DaemonProcess) -> None:
    """It asks for much and reads nothing; its slots are not stepped, and others go on."""
    body = json.dumps({"start": [0], "ends": False}).encode()
    head = f"POST /v2/models/counts/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", daemon.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.sendall((head + body) * 3)
        for _ in range(20):
            assert steps.answers((1,), count=3) == [1, 2, 3, None]


def test_unloading_waits_for_those_that_have_begun(daemon: DaemonProcess) -> None:
    with Steps(daemon.grpc_url) as others, ThreadPoolExecutor() as pool:
        for number in range(4):
            others.ask(str(number), (number,), ends=False)
        others.take()
        reloaded = pool.submit(daemon.request, "POST", "/v2/repository/models/counts/load", b"{}")
        for number, got in enumerate(others.all_of(*map(str, range(4)))):
            assert got == [*range(number, number + 41), None]
        assert reloaded.result()[0] == 200
        assert others.answers((1,), count=2) == [1, 2, None]
