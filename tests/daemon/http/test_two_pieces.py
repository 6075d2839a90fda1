"""A request whose body comes after a head that was parsed before; and a head that nothing follows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.fakes import Client, EchoWorker, FrontProcess, binary_request, in_service, serving
from tests.records import Tensor, WholeAnswer, WholeRequest, is_numbered
from tests.work.connection import Bench, KeptTransport
from tests.work.counter import Work

CONTENT = bytes(range(64))
REQUEST = binary_request(CONTENT, model="addsub")
HEAD = REQUEST.index(b"\r\n\r\n") + 4


def echo(_: object, record: WholeRequest) -> WholeAnswer:
    place = record.inputs[0].place
    assert isinstance(place, bytes)
    return WholeAnswer(record.request_id, version=1, outputs=(Tensor("y", "UINT8", (len(place),), place),))


async def known(bench: Bench) -> KeptTransport:
    """Returns a connection whose requests are prepared already."""
    transport = bench.connect()
    for _ in range(3):
        await bench.answer(Work(), [(transport, REQUEST)], echo)
    transport.writes.clear()
    return transport


@pytest.mark.parametrize("cut", [HEAD, HEAD + 1, HEAD + 40, len(REQUEST) - 1])
async def test_what_comes_in_two_pieces_goes_the_short_way(cut: int) -> None:
    bench = Bench()
    with contextlib.closing(bench):
        transport = await known(bench)
        for number in range(3):
            content = np.full(64, number, np.uint8).tobytes()
            request = REQUEST[:-64] + content
            transport.arrive(request[:cut])
            await asyncio.sleep(0)
            assert bench.worker.receive() is None
            transport.arrive(request[cut:])
            await asyncio.sleep(0)
            (record,) = bench.worker.receive() or ()
            assert is_numbered(record)
            assert record.contents == (content,)
            tensor = Tensor("y", "UINT8", (64,), content)
            bench.worker.complete(WholeAnswer(record.request_id, version=1, outputs=(tensor,)).record)
            bench.worker.flush()
            while not transport.writes:
                await asyncio.sleep(0)
            assert b"".join(transport.writes.pop()).endswith(content)


@pytest.mark.parametrize("cut", [1, HEAD - 1, HEAD, HEAD + 40])
async def test_what_goes_on_differently_is_read_anew(cut: int) -> None:
    """A request as long as the known one with another tensor in its JSON is parsed anew, and so are two in place of one."""
    other = REQUEST.replace(b'"x"', b'"X"')
    for rest, names in ((other[cut:], ["X"]), (REQUEST[cut:] + REQUEST, ["x", "x"])):
        bench = Bench()
        with contextlib.closing(bench):
            transport = await known(bench)
            transport.arrive((REQUEST if rest != other[cut:] else other)[:cut])
            transport.arrive(rest)
            found = []
            for _ in names:
                await asyncio.sleep(0)
                for record in filter(None, map(bench._whole.read, bench.worker.receive() or ())):
                    found.append(record.inputs[0].name)
                    bench.worker.complete(echo(None, record).record)
                    bench.worker.flush()
                while len(transport.writes) < len(found):
                    await asyncio.sleep(0)
            for _ in range(8):
                await asyncio.sleep(0)
            found += [
                record.inputs[0].name for record in filter(None, map(bench._whole.read, bench.worker.receive() or ()))
            ]
            assert found == names


async def test_a_body_that_comes_by_the_byte_gains_no_time() -> None:
    """Neither while the request may still be the known one nor when it turns out to be another."""
    bench = Bench()
    with contextlib.closing(bench):
        transport = await known(bench)
        times = transport._protocol.order.times
        transport.arrive(REQUEST[:HEAD])
        times.body_since = since = times.body_since - 5
        assert since > 0
        other = REQUEST.replace(b'"x"', b'"X"')
        for at in range(HEAD, HEAD + 40):
            transport.arrive(other[at : at + 1])
            assert times.body_since == since
        transport.arrive(other[HEAD + 40 : -1])
        assert times.body_since == since
        transport.arrive(other[-1:])
        assert times.body_since == 0


@contextlib.contextmanager
def head_only(**http: float) -> Iterator[tuple[FrontProcess, EchoWorker, Client]]:
    """Yields a client whose requests are prepared already, and that has then sent only a head."""
    with serving(http={"port": 0, **http}) as (front, (worker,)), front.client() as client:
        request = binary_request(CONTENT)
        for _ in range(3):
            client.send(request)
            worker.echo(worker.next())
            assert client.answer().parts == CONTENT
        client.send(request[: request.index(b"\r\n\r\n") + 4])
        yield front, worker, client


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    # Longer than the three exchanges before it could take on any machine.
    with head_only(body_timeout=3.0) as (_, worker, client):
        answer = client.answer()
        assert (answer.status, "the request body was not whole within 3 s" in answer.error) == (408, True)
        assert client.ends()
        assert worker.idle(0.05)


def test_a_client_that_ends_after_its_head() -> None:
    with head_only() as (_, worker, client):
        client.sock.shutdown(1)
        answer = client.answer()
        assert (answer.status, "in the middle of a request" in answer.error) == (400, True)
        assert client.ends()
        assert worker.idle(0.05)


def test_a_front_that_stops_lets_the_body_come() -> None:
    with head_only() as (front, worker, client), front.client() as idle:
        in_service(front, worker, idle)
        front.stop(30)
        assert idle.ends()
        client.send(binary_request(CONTENT)[binary_request(CONTENT).index(b"\r\n\r\n") + 4 :])
        worker.echo(worker.next())
        answer = client.answer()
        assert (answer.parts, answer.headers["connection"]) == (CONTENT, "close")
        assert client.ends()
