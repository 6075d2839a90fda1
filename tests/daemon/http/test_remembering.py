"""A front that remembers heads, texts, requests and answers sends the same bytes as one that remembers nothing."""

from __future__ import annotations

import gc
import itertools
import random

import msgspec
import pytest

from tensord.config.options import Expert
from tensord.shm.control_records import ModelGone, ModelState
from tests.daemon.http.large_client import SIZE, EchoingWorker, LargeBench, connection_of, exchange, head_size, turns
from tests.daemon.http.large_client import request as plain_request
from tests.faults.varied import MODELS, Dice
from tests.work.connection import OPTIONS, KeptTransport

UNREMEMBERING = msgspec.structs.replace(OPTIONS, expert=Expert(max_prepared=0))
CONNECTIONS = 4


class Front:
    """A front with its worker and its clients' connections."""

    def __init__(self, remembers: bool) -> None:
        self.bench = LargeBench() if remembers else LargeBench(UNREMEMBERING)
        self.worker = EchoingWorker(self.bench)
        self.connections: dict[int, KeptTransport] = {}
        for name in MODELS:
            self.change(ModelState(name, 1, "READY", workers=(7,), metadata=b"{}", config=b"{}"))

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


def pieces_of(content: bytes, chance: random.Random) -> list[bytes]:
    """Cuts a request as clients send it: whole, its head by itself, or anywhere."""
    match chance.randrange(6):
        case 0 | 1 | 2:
            cuts: list[int] = []
        case 3 | 4:
            cuts = [head_size(content)]
        case _:
            cuts = sorted(chance.randrange(1, len(content)) for _ in range(2))
    bounds = [0, *cuts, len(content)]
    return [piece for start, end in itertools.pairwise(bounds) if (piece := content[start:end])]


@pytest.mark.parametrize("seed", range(3))
async def test_the_same_requests_get_the_same_answers(seed: int) -> None:
    """Over several connections, models in turn, some of them gone and back in between, some requests sent again as they were."""
    dice, chance = Dice(seed, wrong=0.2, regions=True), random.Random(seed)
    fronts = [Front(True), Front(False)]
    try:
        before: list[bytes] = []
        for _ in range(400):
            if chance.random() < 0.08:
                name = dice.choice(*MODELS)
                ready = ModelState(name, 1, "READY", workers=(7,), metadata=b"{}", config=b"{}")
                state = ModelGone(name, 1) if dice.chance(0.2) else ready
                for front in fronts:
                    front.change(state)
            content = dice.choice(*before) if before and dice.chance(0.5) else dice.asked().http()
            before = [*before[-30:], content]
            pieces, number = pieces_of(content, chance), chance.randrange(CONNECTIONS)
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
    # A refusal that waited for its turn holds what led to it.
    gc.collect()


@pytest.mark.parametrize("size", [4, SIZE])
async def test_the_last_answer_of_a_connection_is_the_same(size: int) -> None:
    """Connections that are used once and say so get the same answers; only the first head is parsed, the others are known."""
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
