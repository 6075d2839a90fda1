"""A failure at each step of a request costs that request its answer: nothing stays counted or on loan, the others are answered.

The steps are those of submitting, sending, sending again and answering, in the submitter and in both protocols' connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import hpack
import pytest
from tritonclient.grpc import service_pb2

from tensord.config.options import Arenas, Requests
from tensord.daemon.grpc import frames
from tensord.daemon.grpc.infer import Infer
from tensord.daemon.grpc.prepared import PreparedMessages
from tensord.daemon.grpc.response_codec import AnswerLayout
from tensord.daemon.grpc.stream import Stream
from tensord.daemon.http import response_codec as http_codec
from tensord.daemon.http.answer_order import AnswerOrder
from tensord.daemon.http.prepared import PreparedRequests
from tensord.daemon.submit import placement
from tensord.daemon.submit.arena_space import ArenaSpace
from tensord.daemon.submit.routing import Routing
from tensord.daemon.submit.submitter import Submitter
from tensord.shm import channel as channel_module
from tensord.shm.arena import ArenaMap
from tensord.shm.channel import Channel
from tensord.shm.control_records import WorkerFenced
from tensord.shm.errors import InvalidArgument, ServingError
from tensord.shm.lane import SubmitterLane, WorkerLane
from tensord.shm.messages import AnswerRecord, Cancel, PreparedAnswer
from tests.daemon.grpc.frame_client import STREAM
from tests.daemon.submit.test_submitter import MIB, Setting
from tests.fakes import complete_numbered
from tests.records import Tensor, WholeAnswer, WholeRequest, is_numbered, whole_answer
from tests.work.connection import Bench, KeptTransport, LaneBench
from tests.work.grpc_connection import GrpcBench, call, message, opened
from tests.work.test_front_work import ROWS as HTTP_ROWS
from tests.work.test_front_work import Row as HttpRow
from tests.work.test_grpc_work import ROWS as GRPC_ROWS
from tests.work.test_grpc_work import Row as GrpcRow


class Broken(Exception):
    """An exception that no code expects."""


class Fault:
    """Stands in for a function and fails in one of its calls."""

    def __init__(self, function: Callable[..., Any], at: int, error: Exception | None = None) -> None:
        """Wraps the function. ``at``: the call that fails, counted from 0."""
        self._function = function
        self._left = at
        self._error = error or Broken("injected")
        self.happened = False

    def arm(self, at: int) -> None:
        """Makes a call fail, counted from now on."""
        self._left = at

    def disarm(self) -> None:
        """Lets all calls succeed from now on."""
        self._left = -1

    def __get__(self, owner: Any, kind: Any) -> Callable[..., Any]:
        return self if owner is None else lambda *arguments, **named: self(owner, *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._left -= 1
        if self._left == -1:
            self.happened = True
            # Were it kept here with its frames, what those hold would be left to the garbage collector.
            raise copy.copy(self._error)
        return self._function(*arguments, **named)


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fault]:
    def inject(owner: Any, name: str, at: int = 0, error: Exception | None = None) -> Fault:
        fault = Fault(getattr(owner, name), at, error)
        monkeypatch.setattr(owner, name, fault)
        return fault

    return inject


# ------------------------------------------------------------------------------------------------------------ submitter


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting(
        arenas=Arenas(byte_size=MIB, max_byte_size=MIB, wait=0.05), requests=Requests(max_in_flight=8, worker_wait=60)
    )
    yield made
    made.close()


def settle(setting: Setting) -> None:
    """Has all workers echo all they have; then checks that nothing is in flight, on loan or held."""
    for _ in range(8):
        setting.turn()
        for worker in setting.workers.values():
            if worker.lane.fileno() >= 0:
                worker.poll()
                while worker._requests:
                    worker.echo(worker.next())
    found = setting.submitter.statistics()
    assert (found["in_flight"], found["leases"], found["answers_held"], found["waiting_for_worker"]) == (0, 0, 0, 0)
    for worker in setting.workers.values():
        if worker.lane.fileno() >= 0:
            assert worker.leases == 0


SENDING = [
    (Submitter, "_route"),
    (Routing, "find"),
    (SubmitterLane, "submit"),
    (SubmitterLane, "submit_at_once"),
    (Channel, "put"),
    (Channel, "flush"),
]


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize(("owner", "name"), SENDING, ids=lambda each: getattr(each, "__name__", each))
def test_sending(setting: Setting, inject: Callable[..., Fault], owner: Any, name: str, idle: bool) -> None:
    setting.ready(setting.open_worker())
    # A busy worker gets no record at once.
    asked = [] if idle or name == "submit_at_once" else [setting.ask()]
    fault = inject(owner, name)
    refused = 0
    for _ in range(3):
        try:
            asked.append(setting.ask())
        except Broken:
            refused += 1
    settle(setting)
    assert fault.happened
    assert [len(each.finals) for each in asked] == [1] * len(asked)
    assert refused == (0 if name == "flush" else 1)
    assert not [final for each in asked for final in each.finals if final.code]


def test_a_record_that_cannot_be_sent_is_refused_to_its_sender(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too large for the worker, or with what no record holds."""
    setting.ready(setting.open_worker())
    before = setting.ask()

    def submit(**fields: Any) -> None:
        lease = setting.submitter.loan(5000)
        assert lease is not None
        record = WholeRequest(
            setting.submitter.next_id(), "m", 0, (Tensor("x", "UINT8", (5000,), lease.place),), **fields
        ).record
        setting.send(record, lambda *_: pytest.fail("it was not sent"), (lease,))

    for value in (1 << 64, -(1 << 63) - 1):
        with pytest.raises(OverflowError):
            submit(deadline_ns=value)
    with pytest.raises(UnicodeEncodeError):
        submit(client_id="\ud800")
    with monkeypatch.context() as patch:
        patch.setattr(channel_module, "MAX_RECORD", 1 << 17)
        with pytest.raises(InvalidArgument, match=r"a record of 1[0-9]+ bytes, at most 131071 can be sent"):
            submit(client_id="x" * (1 << 17))
    after = setting.ask()
    settle(setting)
    assert [final.code for final in before.finals + after.finals] == ["", ""]


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        *((owner, name, at) for owner, name in ((Routing, "find"), (Channel, "put")) for at in range(3)),
        # The first one goes at once, the others with the turn.
        (SubmitterLane, "submit_at_once", 0),
        (SubmitterLane, "submit", 0),
        (SubmitterLane, "submit", 1),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_sending_what_waited_for_a_worker(
    setting: Setting, inject: Callable[..., Fault], owner: Any, name: str, at: int
) -> None:
    setting.ready()
    asked = [setting.ask() for _ in range(3)]
    worker = setting.open_worker()
    # The worker's lane is announced a segment first, by the first request that needs it.
    fault = inject(owner, name, at)
    setting.ready(worker)
    settle(setting)
    assert fault.happened
    assert sorted(final.code for each in asked for final in each.finals) == ["", "", "INTERNAL"]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Routing, "find"), (Channel, "put"), (Submitter, "_route")],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_sending_again_after_a_worker_died(
    setting: Setting, inject: Callable[..., Fault], owner: Any, name: str, at: int
) -> None:
    first, second = setting.open_worker(), setting.open_worker()
    setting.ready(first)
    asked = [setting.ask() for _ in range(3)]
    setting.turn()
    setting.ready(second)
    first.die()
    fault = inject(owner, name, at)
    setting.submitter.fence(WorkerFenced(first.incarnation))
    settle(setting)
    assert fault.happened
    assert sorted(final.code for each in asked for final in each.finals) == ["", "", "INTERNAL"]


@pytest.mark.parametrize("size", [100, 5000])
def test_an_owner_that_cannot_take_its_answer(setting: Setting, size: int) -> None:
    """It is told once that there is none; the lease of its answer goes back."""
    worker = setting.open_worker()
    setting.ready(worker)
    told: list[WholeAnswer] = []

    def completed(prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        told.append(whole_answer(prepared, record))
        if len(told) == 1:
            raise Broken("injected")

    before = setting.ask()
    record = WholeRequest(setting.submitter.next_id(), "m", 0, (Tensor("x", "UINT8", (size,), bytes(size)),)).record
    setting.send(record, completed)
    after = setting.ask()
    settle(setting)
    assert [final.code for final in (*before.finals, *told, *after.finals)] == ["", "", "INTERNAL", ""]


def test_who_waited_for_room_and_cannot_use_it(setting: Setting) -> None:
    held = [setting.submitter.loan(250_000) for _ in range(4)]
    found: list[Any] = []

    def fail(lease: Any) -> None:
        found.append(lease)
        raise Broken("injected")

    setting.submitter.wait_for_room(1000, fail)
    setting.submitter.wait_for_room(1000, found.append)
    setting.submitter.give_back(held.pop())  # type: ignore[arg-type]
    assert len(found) == 2
    setting.submitter.give_back(found[1])
    # The same where they waited in vain.
    refill = setting.submitter.loan(250_000)
    setting.submitter.wait_for_room(250_000, fail)
    setting.submitter.wait_for_room(250_000, found.append)
    setting.sleep(0.4)
    assert [isinstance(each, ServingError) for each in found[2:]] == [True, True]
    for lease in (*held, refill):
        assert lease is not None
        setting.submitter.give_back(lease)
    assert setting.submitter.statistics()["leases"] == 0


# ------------------------------------------------------------------------------------------------------------ protocols


class Cut(KeptTransport):
    """Ends when it is aborted, as a real one does."""

    ended = False
    #: The daemon has said that nothing more comes.
    hung_up = False

    def abort(self) -> None:
        if not self.ended:
            self.ended = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    close = abort

    def is_closing(self) -> bool:
        return self.ended

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.hung_up = True

    @property
    def written(self) -> bytes:
        return b"".join(bytes(piece) for write in self.writes for piece in write)


async def work_off(bench: LaneBench, complete: Callable[[WorkerLane, WholeRequest], WholeAnswer]) -> None:
    """Has the worker answer all requests until no more come."""
    for _ in range(30):
        await asyncio.sleep(0)
        while (records := bench.worker.receive()) is not None:
            for record in records:
                if isinstance(record, Cancel):
                    continue
                whole = bench._whole.read(record)
                if whole is None:
                    continue
                completion = complete(bench.worker, whole)
                if is_numbered(record):
                    complete_numbered(bench.worker, completion)
                else:
                    bench.worker.complete(completion.record)
        assert bench.worker.flush()


def nothing_is_held(bench: LaneBench) -> None:
    found = bench.submitter.statistics()
    assert (found["in_flight"], found["leases"], found["answers_held"]) == (0, 0, 0)
    while bench.worker.receive() is not None:
        pass
    assert bench.worker.arena.statistics()["leases"] == 0


def on_a_bench(make: type[LaneBench], test: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    """Runs a test's coroutine, and sees that no exception reached the loop."""

    async def run() -> None:
        uncaught: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: uncaught.append(context))
        with contextlib.closing(make()) as bench:
            await test(bench)
            nothing_is_held(bench)
        assert not uncaught

    asyncio.run(run())
    # What was raised refers to views of the arena, which keep its mapping.
    gc.collect()


HTTP_FAULTS = [
    (PreparedRequests, "read"),
    (placement, "place"),
    (Submitter, "_route"),
    (ArenaSpace, "loan"),
    (Submitter, "_put"),
    (SubmitterLane, "submit"),
    (SubmitterLane, "submit_at_once"),
    (http_codec, "encode"),
    (http_codec, "response_head"),
    (ArenaMap, "view"),
    (AnswerOrder, "answer_whole"),
    (AnswerOrder, "answer_pieces"),
]


def http_answers(transport: Cut) -> list[int]:
    """Returns the statuses of the answers, in order."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", transport.written)]


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize(
    "row", [row for row in HTTP_ROWS if not row.fresh and "shm" not in row.name], ids=lambda row: row.name
)
@pytest.mark.parametrize(("owner", "name"), HTTP_FAULTS, ids=lambda each: getattr(each, "__name__", each))
def test_http(inject: Callable[..., Fault], owner: Any, name: str, row: HttpRow, warm: int) -> None:
    """1. three clients ask, each ``warm`` times; 2. each once more, and one of them meets the fault; 3. each once more."""

    # Lanes keep some of these functions: they are replaced before one is made.
    fault = inject(owner, name, -1)

    async def failing(bench: Bench) -> None:
        bench.transport = Cut
        clients: list[Any] = [bench.connect() for _ in range(3)]
        for number in range(warm):
            for client in clients:
                client.arrive(row.request(number))
                await work_off(bench, row.complete)
        fault.arm(1)
        for client in clients:
            client.arrive(row.request(7))
            await work_off(bench, row.complete)
        fault.disarm()
        unhurt = [client for client in clients if http_answers(client) == [200] * (warm + 1) and not client.ended]
        # Who met it was told so or cut off, rather than left waiting.
        hurt = [client for client in clients if client not in unhurt]
        assert len(hurt) <= fault.happened
        assert all(client.ended or http_answers(client) == [200] * warm + [500] for client in hurt)
        for client in clients:
            if not client.ended and not client.hung_up:
                before = len(http_answers(client))
                client.arrive(row.request(8))
                await work_off(bench, row.complete)
                assert http_answers(client)[before:] == [200]

    on_a_bench(Bench, failing)


GRPC_FAULTS = [
    (PreparedMessages, "understand"),
    (PreparedMessages, "read"),
    (PreparedMessages, "is_usable"),
    (AnswerLayout, "pieces"),
    (Infer, "_ask_known"),
    (Infer, "_ask_read"),
    (Submitter, "_route"),
    (ArenaSpace, "loan"),
    (Submitter, "_put"),
    (SubmitterLane, "submit"),
    (SubmitterLane, "submit_at_once"),
    (AnswerLayout, "__init__"),
    (ArenaMap, "view"),
    (Stream, "answer"),
    (Stream, "send"),
]


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("row", [row for row in GRPC_ROWS if "shm" not in row.name], ids=lambda row: row.name)
@pytest.mark.parametrize(("owner", "name"), GRPC_FAULTS, ids=lambda each: getattr(each, "__name__", each))
def test_grpc(
    inject: Callable[..., Fault], caplog: pytest.LogCaptureFixture, owner: Any, name: str, row: GrpcRow, warm: int
) -> None:
    """Faults are told over gRPC as over HTTP; on a stream a fault changes no other client's messages, nor the stream's others."""

    fault = inject(owner, name, -1)

    async def failing(bench: GrpcBench) -> None:
        bench.transport = Cut
        clients = [GrpcClient(bench, row) for _ in range(3)]
        for _ in range(warm):
            for client in clients:
                client.ask()
                await work_off(bench, row.complete)
        fault.arm(1)
        for client in clients:
            client.ask()
            await work_off(bench, row.complete)
        fault.disarm()
        answers = [client.answers() for client in clients]
        assert all(
            sum(answer) == client.asked or client.transport.ended
            for answer, client in zip(answers, clients, strict=True)
        )
        assert [bad for _, bad in answers].count(0) >= (2 if fault.happened else 3)
        for client in clients:
            if client.usable:
                client.ask()
                await work_off(bench, row.complete)
                good, bad = client.answers()
                assert good + bad == client.asked
        assert not any(client.connection.http2.streams for client in clients if not row.streams)

    on_a_bench(GrpcBench, failing)
    # What is kept of the log has frames with views of the arena in it.
    caplog.clear()


class GrpcClient:
    """One connection with unary calls, or with as many streams as the row says."""

    def __init__(self, bench: GrpcBench, row: GrpcRow) -> None:
        self.transport: Any = bench.connect()
        self.connection = self.transport._protocol
        self._row = row
        self._numbers = itertools.count(1, 2)
        self.asked = 0
        self._streams = [next(self._numbers) for _ in range(row.streams)]
        self.transport.arrive(b"".join(opened(number, STREAM) for number in self._streams))

    @property
    def usable(self) -> bool:
        return not self.transport.ended and all(number in self.connection.http2.streams for number in self._streams)

    def ask(self) -> None:
        row = self._row
        if not row.streams:
            self.transport.arrive(call(next(self._numbers), row.content(""), row.granted))
        else:
            self.transport.arrive(b"".join(message(number, row.content("1"), row.granted) for number in self._streams))
        self.asked += max(1, row.streams)

    def answers(self) -> tuple[int, int]:
        """Returns how many answers are good, and how many are errors."""
        written, decoder = self.transport.written, hpack.Decoder()
        messages: dict[int, bytes] = {}
        good = bad = at = 0
        while at < len(written):
            high, low, kind, _, number = frames.read_head(written, at)
            payload = written[at + frames.HEAD_SIZE : at + frames.HEAD_SIZE + (high << 16 | low)]
            at += frames.HEAD_SIZE + len(payload)
            if kind == frames.DATA:
                messages[number] = messages.get(number, b"") + payload
            elif kind == frames.HEADERS:
                bad += dict(decoder.decode(payload)).get("grpc-status", "0") != "0"
        for content in messages.values():
            while content:
                size = int.from_bytes(content[1:5], "big")
                piece, content = content[5 : 5 + size], content[5 + size :]
                if self._row.streams and service_pb2.ModelStreamInferResponse.FromString(piece).error_message:
                    bad += 1
                else:
                    good += 1
        return good, bad
