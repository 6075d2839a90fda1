"""An ordinary client notices what is wrong, and knows a lost connection from a refused request."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from bench.bystander import LOST, Asked, Bystander, mixed, requests, small
from tests.daemon_process import DaemonProcess


def failures(protocol: str, address: str, asked: Sequence[Asked]) -> list[str]:
    """Asks, and returns how each failure begins."""
    bystander = Bystander(protocol, address, iter(asked))
    for _ in asked:
        bystander.ask()
    bystander.close()
    return [said.partition(":")[0] for said in bystander.report()["failures"]]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_wrong_answers_are_noticed(daemon: DaemonProcess, protocol: str) -> None:
    address = {"http": daemon.url, "grpc": daemon.grpc_url}[protocol]
    with requests(protocol, address, "mixed") as source:
        assert failures(protocol, address, list(islice(source, 120))) == []
    good = next(small())
    wrong = {name: values + 1 for name, values in good.outputs.items()}
    for in_json in (False, True):
        assert failures(protocol, address, [replace(good, outputs=wrong, in_json=in_json)]) == ["wrong answer"]
    assert failures(protocol, address, [replace(good, outputs={})]) == ["addsub answers"]
    assert failures(protocol, address, [replace(good, model="missing")]) not in ([], [LOST])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_connection_that_is_lost_is_no_refusal(protocol: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    missing = Asked("missing", {"INPUT0": np.zeros(1, np.float32)}, {})
    assert failures(protocol, address, [missing]) == [LOST]


def test_requests_differ() -> None:
    values = np.zeros(16, np.float32)
    made = list(islice(mixed("region", values), 600))
    assert (
        len({b"".join(map(bytes, asked.inputs.values())) for asked in made if asked.inputs.keys() != {"INPUT0"}}) > 400
    )
    assert {asked.region for asked in made} == {"", "region"}
    assert {asked.in_json for asked in made} == {False, True}
    assert any(not asked.outputs for asked in made)
