"""Large requests that repeat travel as prepared requests; clients see no difference, and no memory stays leased."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.config.options import Http, Options
from tensord.shm.control_records import ModelGone, ModelState, RegionPlace
from tensord.shm.messages import Slice
from tests.daemon.http.large_client import (
    SIZE,
    EchoingWorker,
    LargeBench,
    connection_of,
    exchange,
    head_size,
    request,
    turns,
)
from tests.generated import examples
from tests.records import Tensor, WholeAnswer, WholeRequest, is_numbered
from tests.work.connection import OPTIONS, Bench, KeptTransport

TIMES = 4


@contextlib.asynccontextmanager
async def a_bench() -> AsyncIterator[tuple[Bench, EchoingWorker]]:
    """Yields a bench, and checks at its end that nothing is on loan at either end of the lane."""
    with contextlib.closing(LargeBench()) as bench:
        worker = EchoingWorker(bench)
        yield bench, worker
        await turns()
        assert worker.leases == 0
        statistics = bench.submitter.statistics()
        assert (statistics["leases"], statistics["in_flight"]) == (0, 0)


@pytest.fixture
async def made() -> AsyncIterator[tuple[Bench, EchoingWorker]]:
    async with a_bench() as made:
        yield made


@pytest.fixture
def bench(made: tuple[Bench, EchoingWorker]) -> Bench:
    return made[0]


@pytest.fixture
def worker(made: tuple[Bench, EchoingWorker]) -> EchoingWorker:
    return made[1]


def tensor(number: int, size: int = SIZE) -> bytes:
    return bytes([number % 251]) * size


def cut(content: bytes, *at: int) -> list[bytes]:
    bounds = [0, *sorted(at), len(content)]
    return [content[start:end] for start, end in itertools.pairwise(bounds) if start < end]


def at_head(content: bytes) -> list[bytes]:
    """Cuts a request as libcurl sends it: the head by itself."""
    return cut(content, head_size(content))


async def known(
    bench: Bench, worker: EchoingWorker, asked: Callable[[int], bytes] = lambda number: request(tensor(number))
) -> KeptTransport:
    """Returns a connection whose requests are prepared already."""
    transport = bench.connect()
    for number in range(2):
        await exchange(worker, transport, at_head(asked(number)))
    assert is_numbered(worker.records[-1])
    return transport


# ------------------------------------------------------------------------------------------------------------ the same


def json_of(*names: str) -> dict[str, Any]:
    """Asks for these outputs as JSON numbers."""
    return {"outputs": [{"name": name, "parameters": {"binary_data": False}} for name in names]}


@pytest.mark.parametrize(
    ("sizes", "headers", "fields"),
    [
        ((SIZE,), (), {}),
        ((SIZE, SIZE + 4), (), {"id": "me"}),
        ((4, SIZE, 512, 513), (), {}),
        ((None, SIZE, None), (), {}),
        ((SIZE,), (), {"parameters": {"binary_data_output": True, "sequence_id": 5, "x": 1.5}}),
        ((SIZE, 4), (), json_of("x0", "x1")),
        ((SIZE, 4), (), {"outputs": [*json_of("x1")["outputs"], {"name": "x0", "parameters": {"binary_data": True}}]}),
        ((SIZE,), ("Connection: keep-alive",), {}),
        ((SIZE,), ("Accept-Encoding: gzip",), {}),
        ((SIZE,), (), {"id": "i" * 2048}),
    ],
    ids=["one", "two", "small", "regions", "parameters", "json", "both", "keep-alive", "gzip", "long"],
)  # fmt: skip
async def test_records_and_answers_are_those_of_a_new_connection(
    sizes: tuple[int | None, ...], headers: tuple[str, ...], fields: dict[str, Any], bench: Bench, worker: EchoingWorker
) -> None:
    same = bench.connect()
    for number in range(TIMES):
        content = b"".join(tensor(number + part, size or 0) for part, size in enumerate(sizes))
        asked = request(content, *headers, sizes=sizes, **fields)
        expected = await exchange(worker, bench.connect(), at_head(asked))
        assert expected.startswith(b"HTTP/1.1 200 OK\r\n")
        assert is_numbered(worker.records[-1]) == (number > 0)
        assert await exchange(worker, same, at_head(asked)) == expected
        assert worker.said[-1] == worker.said[-2]
        assert is_numbered(worker.records[-1])
        assert worker.leases == 0


async def test_large_tensors_are_told_by_their_places(bench: Bench, worker: EchoingWorker) -> None:
    """Large tensors lie aligned; tiny ones travel in the record, and region references are part of the prepared request."""
    sizes = (SIZE, 4, None)
    await known(bench, worker, lambda number: request(tensor(number, SIZE + 4), sizes=sizes))
    record = worker.records[-1]
    assert is_numbered(record)
    place, small = record.contents
    assert isinstance(place, Slice)
    assert (place.byte_size, place.offset % 64) == (SIZE, 0)
    assert small == tensor(1, 4)


ASKED = request(tensor(9))
HEAD = head_size(ASKED)
TEXT = len(ASKED) - SIZE


REQUESTS = [
    request(tensor(1)),
    request(tensor(1)),
    request(tensor(1)).replace(b'"x0"', b'"z0"'),
    request(tensor(1), id="me"),
    request(tensor(1, SIZE + 100), sizes=(SIZE, 100)),
    request(tensor(1, 40 << 10)),
    request(tensor(1, 8)),
    b"POST /v2/models/none/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
]


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(range(len(REQUESTS))), st.integers(0, 250)), max_size=8), st.data())
async def test_any_requests_in_any_pieces_are_answered_as_if_each_came_alone(
    asked: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Behind each other, some of them before the last one is answered."""

    def with_tensor(number: int, fill: int) -> bytes:
        size = next(size for size in (SIZE + 100, SIZE, 40 << 10, 8, 0) if REQUESTS[number].endswith(tensor(1, size)))
        return REQUESTS[number][: len(REQUESTS[number]) - size] + tensor(fill, size)

    async with a_bench() as (bench, worker):
        contents = [with_tensor(number, fill) for number, fill in asked]
        expected = b"".join([await exchange(worker, bench.connect(), [content]) for content in contents])
        once = worker.said[:]
        same, got, stream = bench.connect(), b"", b"".join(contents)
        heads = []
        start = 0
        for content in contents:
            heads += [start, start + head_size(content)]
            start += len(content)
        cuts = data.draw(st.lists(st.sampled_from(heads) if heads else st.nothing(), max_size=12)) if heads else []
        if stream:
            cuts += data.draw(st.lists(st.integers(0, len(stream)), max_size=4))
        for piece in cut(stream, *cuts):
            if data.draw(st.booleans()):
                same.arrive(piece)
                await turns(1)
            else:
                got += await exchange(worker, same, [piece])
        assert got + await exchange(worker, same, []) == expected
        assert worker.said[len(once) :] == once

    # A refusal that waited for its turn holds what led to it.
    gc.collect()


# ------------------------------------------------------------------------------------------------------------- answers


def small(whole: WholeRequest) -> WholeAnswer:
    return WholeAnswer(whole.request_id, version=1, outputs=(Tensor("y", "UINT8", (2,), b"ab"),))


def refused(whole: WholeRequest) -> WholeAnswer:
    return WholeAnswer(whole.request_id, code="INVALID_ARGUMENT", message="not that")


async def test_answers_of_other_kinds(bench: Bench, worker: EchoingWorker) -> None:
    """Small answers, errors, unprepared answers and answers of another size come out as if none had been remembered."""

    def half(whole: WholeRequest) -> WholeAnswer:
        lease = bench.worker.loan(SIZE // 2)
        assert lease is not None
        lease.view[:] = tensor(5, SIZE // 2)
        return WholeAnswer(
            whole.request_id, version=1, outputs=(Tensor("x0", "UINT8", (SIZE,), lease.place),), lease=lease.key
        )

    transport = await known(bench, worker)
    for complete in (None, small, small, None, refused, None, half, None, half):
        expected = await exchange(worker, bench.connect(), at_head(ASKED), complete)
        assert (b"not that" in expected) == (complete is refused)
        assert await exchange(worker, transport, at_head(ASKED), complete) == expected
        assert is_numbered(worker.records[-1])
        # As it came before the worker knew the form.
        transport.arrive(ASKED)
        await turns()
        worker.take()
        worker.waiting = [(whole, False) for whole, _ in worker.waiting]
        worker.answer(complete)
        assert await exchange(worker, transport, []) == expected


async def test_an_answer_outside_the_arena_is_an_error_for_its_client_alone(
    bench: Bench, worker: EchoingWorker
) -> None:
    def outside(whole: WholeRequest) -> WholeAnswer:
        good = worker.echo(whole)
        (output,) = good.outputs
        place = Slice(output.place.segment, 1 << 40, SIZE)  # type: ignore[union-attr]
        return WholeAnswer(
            whole.request_id,
            version=1,
            outputs=(Tensor(output.name, "UINT8", output.shape, place),),
            lease=good.lease,
        )

    transport = await known(bench, worker)
    good = await exchange(worker, transport, at_head(ASKED))
    assert good.endswith(tensor(9))
    assert b"leave a segment" in await exchange(worker, transport, at_head(ASKED), outside)
    assert await exchange(worker, transport, at_head(ASKED)) == good


async def test_the_lease_of_an_answer_stays_until_it_is_written(bench: Bench, worker: EchoingWorker) -> None:
    transport = await known(bench, worker)
    connection = connection_of(transport)
    write = transport.writelines

    def paused(pieces: Any) -> None:
        write(pieces)
        connection.pause_writing()

    transport.writelines = paused  # type: ignore[method-assign]
    got = await exchange(worker, transport, at_head(ASKED))
    assert is_numbered(worker.records[-1])
    assert got.endswith(tensor(9))
    assert worker.leases == 1
    # What comes meanwhile is not taken for the known one.
    transport.arrive(ASKED[:HEAD])
    connection.resume_writing()
    await turns()
    assert worker.leases == 0
    transport.writelines = write  # type: ignore[method-assign]
    assert await exchange(worker, transport, [ASKED[HEAD:]]) == got


# ------------------------------------------------------------------------------------------------ what is not remembered


async def test_a_model_that_goes_and_comes_back(bench: Bench, worker: EchoingWorker) -> None:
    """A model may also go while the body arrives: it was there when the request came, and is gone when it is sent."""
    transport = await known(bench, worker)
    good = await exchange(worker, transport, at_head(ASKED))
    ready = ModelState("identity", 1, "READY", workers=(7,), metadata=b"{}", config=b"{}")
    bench.submitter.model_changed(ModelGone("identity", 1))
    missing = await exchange(worker, transport, at_head(ASKED))
    assert b" 404 " in missing
    bench.submitter.model_changed(ready)
    assert await exchange(worker, transport, at_head(ASKED)) == good
    assert is_numbered(worker.records[-1])
    transport.arrive(ASKED[:HEAD])
    bench.submitter.model_changed(ModelGone("identity", 1))
    assert await exchange(worker, transport, [ASKED[HEAD:]]) == missing
    bench.submitter.model_changed(ready)
    bench.submitter.region_placed(RegionPlace("other", "cpu:0"))
    assert await exchange(worker, transport, at_head(ASKED)) == good
    bench.submitter.model_changed(ModelState("other", 1, "READY", workers=(7,), metadata=b"{}", config=b"{}"))
    assert await exchange(worker, transport, at_head(ASKED)) == good
    assert is_numbered(worker.records[-1])


async def test_no_room_in_the_arena(bench: Bench, worker: EchoingWorker) -> None:
    """It waits like any other."""
    transport = await known(bench, worker)
    good = await exchange(worker, transport, at_head(ASKED))
    arena = bench.submitter._arena
    arena_loan, held = arena.loan, bench.submitter.loan(1)
    assert held is not None
    arena.loan = lambda byte_size: None  # type: ignore[method-assign]
    assert await exchange(worker, transport, at_head(ASKED)) == b""
    arena.loan = arena_loan  # type: ignore[method-assign]
    bench.submitter.give_back(held)
    assert await exchange(worker, transport, []) == good
    assert await exchange(worker, transport, at_head(ASKED)) == good
    assert is_numbered(worker.records[-1])


# ------------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("at", [HEAD, HEAD + 5, TEXT + 5000, len(ASKED)])
async def test_a_client_that_leaves_in_the_middle(at: int, bench: Bench, worker: EchoingWorker) -> None:
    """Nothing of its request stays; where a worker has it already, that is told."""
    transport = await known(bench, worker)
    for piece in cut(ASKED[:at], HEAD):
        transport.arrive(piece)
    await turns()
    worker.take()
    assert bench.submitter.statistics()["leases"] == 1
    transport._protocol.connection_lost(None)
    await turns()
    worker.take()
    sent = [whole.request_id for whole, _ in worker.waiting]
    assert worker.cancelled == sent
    assert len(sent) == (at == len(ASKED))
    worker.answer()
    await turns()
    assert transport.writes == []


@pytest.mark.parametrize("turn", range(4))
async def test_a_client_that_leaves_while_its_answer_is_compressed(turn: int) -> None:
    options = Options(expert=OPTIONS.expert, http=Http(response_compression="low"))
    with contextlib.closing(LargeBench(options)) as bench:
        worker, transport = EchoingWorker(bench), bench.connect()
        transport.arrive(request(tensor(1, 4 * SIZE), "Accept-Encoding: gzip"))
        await turns()
        worker.take()
        worker.answer()
        await turns(3 + turn)
        assert bench.serving.conversions._jobs
        transport._protocol.connection_lost(None)
        await turns(20)
        assert worker.leases == 0
        assert transport.writes == []


async def test_requests_that_come_before_the_answer(bench: Bench, worker: EchoingWorker) -> None:
    transport = await known(bench, worker)
    expected = [await exchange(worker, bench.connect(), [asked]) for asked in (ASKED, request(tensor(8)), REQUESTS[6])]
    for piece in (*at_head(ASKED), *at_head(request(tensor(8))), REQUESTS[6]):
        transport.arrive(piece)
        await turns()
    assert await exchange(worker, transport, []) == b"".join(expected)
    for _ in range(2):
        assert await exchange(worker, transport, at_head(ASKED)) == expected[0]
    assert is_numbered(worker.records[-1])
