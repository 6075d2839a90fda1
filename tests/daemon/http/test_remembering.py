"""A front that remembers heads, texts, requests and answers sends the same bytes as one that remembers nothing."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
from typing import Any

import msgspec
import pytest

from tensord.config.options import Expert
from tensord.shm.control_records import ModelGone, ModelState
from tests.daemon.http.large_client import SIZE, EchoingWorker, LargeBench, connection_of, exchange, head_size, turns
from tests.daemon.http.large_client import request as plain_request
from tests.work.connection import OPTIONS, KeptTransport

UNREMEMBERING = msgspec.structs.replace(OPTIONS, expert=Expert(max_prepared=0))
CONNECTIONS = 4
MODELS = (*("addsub", "identity") * 5, "none")


class Front:
    """A front with its worker and its clients' connections."""

    def __init__(self, remembers: bool) -> None:
        self.bench = LargeBench() if remembers else LargeBench(UNREMEMBERING)
        self.worker = EchoingWorker(self.bench)
        self.connections: dict[int, KeptTransport] = {}

    async def ask(self, number: int, pieces: list[bytes]) -> bytes:
        transport = self.connections.get(number) or self.connections.setdefault(number, self.bench.connect())
        got = await exchange(self.worker, transport, pieces)
        connection = connection_of(transport)
        if transport.is_closing() or connection.order.closing or not connection.idle:
            # It ends, or waits for the rest of a body that was announced too long.
            del self.connections[number]
            connection.connection_lost(None)
        return got

    def change(self, state: ModelState | ModelGone) -> None:
        self.bench.submitter.model_changed(state)


def said(dice: random.Random) -> tuple[bytes, bytes]:
    """Draws a request's JSON and its binary part; mostly valid ones, of not too many kinds."""
    inputs: list[dict[str, Any]] = []
    tail = b""
    for name in ("x", "y")[: dice.choice((1, 1, 2))]:
        rows = dice.choice((1, 2, 3, SIZE // 4 if dice.random() < 0.1 else 1))
        content = dice.randbytes(4 * rows)
        entry: dict[str, Any] = {"name": name, "datatype": "UINT8", "shape": [rows, 4]}
        match dice.randrange(8):
            case 0:
                entry["parameters"] = {"shared_memory_region": "r", "shared_memory_byte_size": 4 * rows}
            case 1 if rows < 100:
                entry["data"] = list(content) if dice.random() < 0.8 else [list(content)] * dice.choice((1, 2))
            case 2 if dice.random() < 0.1:
                entry["data"] = dice.choice([[300] * 4 * rows, "?", None, [True], 1])
            case _:
                entry["parameters"] = {"binary_data_size": len(content) + (dice.random() < 0.02)}
                tail += content
        inputs.append(entry)
    fields: dict[str, Any] = {"inputs": inputs}
    if dice.random() < 0.6:
        fields["id"] = dice.choice(("", "me", "me", f"{dice.random()}", 'q"\u00e4\n'))
    if dice.random() < 0.7:
        binary = {"binary_data": dice.random() < 0.8}
        fields["outputs"] = [{"name": each["name"], "parameters": binary} for each in inputs]
    if dice.random() < 0.4:
        fields["parameters"] = dice.choice(
            ({"binary_data_output": True}, {"x": 1}, {"x": True}, {"x": 1.0}, {"n": dice.random()}, {"triton_x": 1}, [])
        )
    if dice.random() < 0.3:
        fields = dict(sorted(fields.items()))
    text = json.dumps(fields, separators=dice.choice(((",", ":"), (", ", ": "))), ensure_ascii=dice.random() < 0.5)
    if dice.random() < 0.04:
        at = dice.randrange(len(text))
        text = text[:at] + dice.choice(("", "x", '"', "}", "NaN", "\0")) + text[at + 1 :]
    return text.encode(), tail + b"?" * (dice.random() < 0.02)


def request(dice: random.Random) -> bytes:
    text, tail = said(dice)
    lines = ["Host: x", f"Content-Length: {len(text) + len(tail)}"]
    if tail or dice.random() < 0.5:
        lines.append(
            f"Inference-Header-Content-Length: {len(text) if dice.random() < 0.98 else dice.choice((0, 99999, -1))}"
        )
    if dice.random() < 0.5:
        lines.append(f"traceparent: 00-{dice.getrandbits(128):032x}-{dice.getrandbits(64):016x}-01")
    if dice.random() < 0.3:
        lines.append(
            dice.choice(("User-Agent: a", "Accept: */*", "accept-encoding: gzip", "Connection: keep-alive", "a: b"))
        )
    if dice.random() < 0.05:
        lines.append(
            dice.choice(("Connection: close", "a : b", "no colon", "Host: y", "Content-Length: 1", "Expect: none"))
        )
    if dice.random() < 0.3:
        dice.shuffle(lines)
    version = "1.1" if dice.random() < 0.97 else dice.choice(("1.0", "1.0", "2.0"))
    versions = dice.choice((*[""] * 12, *["/versions/1"] * 6, "/versions/2", "/versions/0"))
    start = f"POST /v2/models/{dice.choice(MODELS)}{versions}/infer HTTP/{version}"
    return "\r\n".join([start, *lines, "", ""]).encode() + text + tail


def pieces_of(content: bytes, dice: random.Random) -> list[bytes]:
    """Cuts a request as clients send it: whole, its head by itself, or anywhere."""
    match dice.randrange(6):
        case 0 | 1 | 2:
            cuts: list[int] = []
        case 3 | 4:
            cuts = [head_size(content)]
        case _:
            cuts = sorted(dice.randrange(1, len(content)) for _ in range(2))
    bounds = [0, *cuts, len(content)]
    return [piece for start, end in itertools.pairwise(bounds) if (piece := content[start:end])]


@pytest.mark.parametrize("seed", range(3))
def test_the_same_requests_get_the_same_answers(seed: int) -> None:
    """Over several connections, models in turn, some of them gone and back in between, some requests sent again as they were."""

    async def test() -> None:
        dice = random.Random(seed)
        fronts = [Front(True), Front(False)]
        try:
            before: list[bytes] = []
            for _ in range(400):
                if dice.random() < 0.08:
                    name = dice.choice(MODELS[:2])
                    ready = ModelState(name, 1, "READY", workers=(7,), metadata=b"{}", config=b"{}")
                    state = ModelGone(name, 1) if dice.random() < 0.2 else ready
                    for front in fronts:
                        front.change(state)
                content = dice.choice(before) if before and dice.random() < 0.5 else request(dice)
                before = [*before[-30:], content]
                pieces, number = pieces_of(content, dice), dice.randrange(CONNECTIONS)
                first, second = [await front.ask(number, pieces) for front in fronts]
                assert first == second, content
                assert fronts[0].worker.said[-1:] == fronts[1].worker.said[-1:]
            assert fronts[0].worker.said == fronts[1].worker.said
            remembered, not_remembered = [
                sum(isinstance(record.prepared, int) for record in front.worker.records) for front in fronts
            ]
            assert remembered > len(fronts[0].worker.records) / 3
            assert not_remembered == 0
            for front in fronts:
                await turns()
                assert front.worker.leases == 0
                assert front.bench.submitter.statistics()["leases"] == 0
        finally:
            for front in fronts:
                front.bench.close()

    asyncio.run(test())
    # A refusal that waited for its turn holds what led to it.
    gc.collect()


@pytest.mark.parametrize("size", [4, SIZE])
def test_the_last_answer_of_a_connection_is_the_same(size: int) -> None:
    """Connections that are used once and say so get the same answers; only the first head is parsed, the others are known."""

    async def test() -> None:
        front = Front(True)
        try:
            content = plain_request(bytes(size), "Connection: close", id="7")
            answers = []
            for number in range(4):
                answers.append(await front.ask(number, [content]))
                assert number not in front.connections
                await turns()
            assert answers[0].startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\nConnection: close\r\n" in answers[0]
            assert answers == answers[:1] * 4
            assert isinstance(front.worker.records[-1].prepared, int)
            assert front.worker.leases == 0
        finally:
            front.bench.close()

    asyncio.run(test())
