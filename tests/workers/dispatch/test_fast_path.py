"""Tests that requests answered in C are answered as in Python, that changes are noticed, and that all others are left alone."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensord.shm.channel import Channel, ChannelClosed, pair
from tensord.shm.control_records import ControlCall, Reply
from tensord.shm.durations import Durations
from tensord.shm.errors import InvalidArgument
from tensord.shm.messages import (
    AnswerRecord,
    Cancel,
    PreparedRequest,
    RegionSlice,
    Release,
    RequestedOutput,
    RequestRecord,
    Slice,
    Timeline,
    ToSubmitter,
    ToWorker,
    TraceContext,
)
from tensord.shm.operations import RegisterSystemRegion, UnregisterRegion
from tensord.shm.prepared import Numbers
from tensord.shm.record import decoder, encoder
from tensord.shm.spin import Spin
from tensord.workers.native.extensions import available
from tensord.workers.programs.grouped_calls import MOST
from tensord.workers.requests.timeline import timeline_end
from tests.daemon_process import ROOT
from tests.records import Tensor, WholeAnswer
from tests.repositories import write_model
from tests.workers.worker_loop import PATIENCE_SECONDS, WorkerLoop, ever_queued

pytestmark = pytest.mark.skipif(not available, reason="the C extension was not built")
if available:
    from tensord.workers.native import _native

MODELS = ROOT / "bench" / "models"
WORDS = 512
ROWS = 4
HOUR_NS = 3_600_000_000_000
#: What was received as the machine started has waited longer than that, and nothing of a test does.
LONG_NS = time.monotonic_ns() // 2


# ------------------------------------------------------------------------------------------------ the C part by itself


class Native:
    """The C part with one lane, and a program of four rows of eight bytes that inverts every bit."""

    def __init__(self, spin: Spin | None = None, protocol: int = 0) -> None:
        self.durations = Durations((0.001, 1e6))
        self.histograms = self.durations.counts, self.durations.bounds
        self.page = np.zeros(2 * WORDS, np.uint64)
        self.epoll = select.epoll()
        self.front, self.lane = pair()
        self.lane.setblocking(False)
        self.epoll.register(self.lane.fileno(), select.EPOLLIN)
        self.in_flight: dict[int, Any] = {}
        self.memory = np.full((ROWS, 8), 0xAA, np.uint8)
        self.runs: list[bytes] = []
        #: The arguments of each run.
        self.chosen: list[tuple[Any, ...]] = []
        self.running: list[list[int]] = []
        self.made: Callable[[], list[Any]] = lambda: [~self.memory]
        self.fast = _native.FastPath(
            self.epoll.fileno(), spin or Spin(0), self.page.data.cast("B"), WORDS, 1, 2, self.has_left
        )
        #: How often the answers of sequences had left.
        self.left = 0
        #: What came of leases that are given back, and what is wrong with them.
        self.returned: list[bytes] = []
        self.wrong: Exception | None = None
        self.fast.open(self.lane.fileno(), 7, self.in_flight, self.take_back, 0, protocol)

    def run(self, *chosen: Any) -> list[Any]:
        self.chosen.append(chosen)
        self.runs.append(self.memory.tobytes())
        self.running.append(self.page[WORDS : WORDS + 1 + 2 * int(self.page[WORDS])].tolist())
        return self.made()

    def has_left(self) -> None:
        self.left += 1

    def take_back(self, datagram: bytes) -> None:
        self.returned.append(datagram)
        if self.wrong is not None:
            raise self.wrong

    def learn(
        self, form: int = 3, clears: bool = True, most_waiting: int = 1000, share: float = 0.0, **changed: Any
    ) -> None:
        address = self.memory.__array_interface__["data"][0]
        said: dict[str, Any] = {
            "inputs": ((0, 8, 0),),
            "outputs": ((0, 0, 8, 8, 0),),
            "intact": None,
            "by_rows": (0,) * ROWS,
            "sequences": None,
            "traced": timeline_end(None),
            "mixes": False,
            "sets": None,
            "delay_ns": 0,
            "full": 0,
            **changed,
        }
        programs = ((self.run, ROWS, clears, ((address, 8),)),)
        batch = (self, 7, most_waiting, share, said["delay_ns"], said["full"], False, said["mixes"], programs)
        batch = *batch, said["by_rows"], said["sequences"], self.histograms
        places = said["inputs"], said["outputs"]
        rest = said["intact"], said["traced"], said["sets"]
        self.fast.learn(self.lane.fileno(), form, batch, 1, *places, 9, *rest)

    def send(self, *records: Any) -> bytes:
        """Sends records as one datagram; returns it."""
        datagram = b"\x01\xdc" + len(records).to_bytes(2, "big") + b"".join(map(encoder.encode, records))
        self.front.send(datagram)
        return datagram

    def answers(self) -> list[AnswerRecord]:
        channel = Channel(self.front.dup(), decoder(ToSubmitter))
        found = []
        while (received := channel.receive()) is not None:
            found += received[0]
        channel.close()
        return found

    def close(self) -> None:
        self.fast.release()
        self.epoll.close()
        self.front.close()
        self.lane.close()


@pytest.fixture
def native() -> Iterator[Native]:
    made = Native()
    yield made
    made.close()


def request(number: int, content: bytes = b"12345678", form: int = 3, **more: Any) -> RequestRecord:
    return RequestRecord(number, form, (content,), **more)


def turned(content: bytes) -> bytes:
    return bytes([byte ^ 0xFF for byte in content])


def test_requests_that_came_together_share_runs(native: Native) -> None:
    native.learn()
    contents = [bytes([n] * 8) for n in range(6)]
    native.send(*[request(n + 1, content) for n, content in enumerate(contents)])
    assert native.fast.wait(0, True) == ([], [], [])
    assert native.answers() == [AnswerRecord(n + 1, 9, (turned(content),)) for n, content in enumerate(contents)]
    # Four rows at once, then two and what nobody fills is zero.
    assert native.runs == [b"".join(contents[:4]), b"".join(contents[4:]) + bytes(16)]


@pytest.mark.parametrize(("share", "datagrams"), [(0.0, 4), (1 / 8, 5), (1 / 2, 6)])
def test_runs_with_little_to_do_share_a_datagram_where_many_wait(native: Native, share: float, datagrams: int) -> None:
    """Six runs; the last ones leave at once because fewer than four requests wait behind them."""
    native.learn(share=share, by_rows=(0,))
    native.send(*[request(number) for number in range(1, 7)])
    native.fast.wait(0, True)
    came = 0
    while True:
        try:
            native.front.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
        came += 1
    assert len(native.runs) == 6
    assert came == datagrams


@pytest.mark.parametrize(("share", "runs"), [(1 / 4, 16), (math.inf, 16)])
def test_after_many_runs_the_rest_is_python_s(native: Native, share: float, runs: int) -> None:
    """So nobody's requests wait for all that somebody has sent, and the queue lets users take turns."""
    native.learn(share=share, by_rows=(0,))
    native.send(*[request(number) for number in range(1, 601)])
    _, ((_, (rest, _, _)),), _ = native.fast.wait(0, True)
    assert [record.request_id for record in decoder(ToWorker).decode(rest[1:])] == list(range(runs + 1, 601))
    assert len(native.runs) == runs


def test_requests_of_one_parameter_set_share_runs_whatever_comes_between_them(native: Native) -> None:
    """With the set itself, which is looked up by its name in the dict as it is then."""
    first, second = object(), object()
    sets: dict[str, Any] = {"a": first}
    native.learn(sets=sets)
    sets["b"] = second
    named = ["a", "b", "", "a", "b", "a", "main", "a", "a", "b"]
    contents = [bytes([n] * 8) for n in range(len(named))]
    native.send(*[request(n + 1, contents[n], parameter_set=name) for n, name in enumerate(named)])
    assert native.fast.wait(0, True) == ([], [], [])
    found = {answer.request_id: answer for answer in native.answers()}
    assert found == {n + 1: AnswerRecord(n + 1, 9, (turned(content),)) for n, content in enumerate(contents)}
    runs = [((first,), [0, 3, 5, 7]), ((second,), [1, 4, 9]), ((), [2, 6]), ((first,), [8])]
    assert native.chosen == [chosen for chosen, _ in runs]
    assert native.runs == [b"".join(contents[n] for n in rows).ljust(32, b"\0") for _, rows in runs]


def test_a_run_of_a_model_that_mixes_sets_gets_that_of_each_row(native: Native) -> None:
    first, second = object(), object()
    native.learn(mixes=True, sets={"a": first, "b": second})
    named = ["a", "", "b", "a", "main", "", "b"]
    native.send(*[request(n + 1, parameter_set=name) for n, name in enumerate(named)])
    assert native.fast.wait(0, True) == ([], [], [])
    assert native.chosen == [((first, None, second, first),), ((None, None, second),)]
    native.send(request(8), request(9, parameter_set="main"))
    native.fast.wait(0, True)
    assert native.chosen[2:] == [()]
    assert [answer.request_id for answer in native.answers()] == [*range(1, 10)]


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def meanwhile(native: Native, *steps: Callable[[], object]) -> list[Any]:
    """Takes steps, each seen by the C part before the next one, during one call of ``wait``, until that returns.

    Returns the records that were for Python. A last one, which ends the call, is not among them.
    """
    over = threading.Event()

    def take() -> None:
        for step in steps:
            began = time.monotonic_ns()
            step()
            # It beats as soon as it has looked at what came.
            wait_until(lambda began=began: native.page[2] > began or over.is_set(), "the C part to look")
            if over.is_set():
                return
        native.send(Cancel(1 << 40))

    thread = threading.Thread(target=take)
    thread.start()
    events, datagrams, unsent = native.fast.wait(int(PATIENCE_SECONDS * 1e9), True)
    over.set()
    thread.join()
    assert (events, unsent) == ([], [])
    given = [record for _, (content, _, _) in datagrams for record in decoder(ToWorker).decode(content[1:])]
    return [record for record in given if not isinstance(record, Cancel)]


def test_requests_wait_for_others_to_share_their_run(native: Native) -> None:
    """Requests wait as long as their model says, an hour here, or until they are enough; what waits at the end is Python's."""
    native.learn(delay_ns=HOUR_NS, full=ROWS)
    contents = [bytes([n] * 8) for n in range(7)]
    sent = [request(n + 1, content) for n, content in enumerate(contents)]
    given = meanwhile(
        native, lambda: native.send(sent[0]), lambda: native.send(*sent[1:3]), lambda: native.send(*sent[3:])
    )
    assert native.runs == [b"".join(contents[:4])]
    assert native.answers() == [AnswerRecord(n + 1, 9, (turned(contents[n]),)) for n in range(4)]
    assert given == sent[4:]
    # Nothing is left of them.
    native.send(request(8))
    assert native.fast.wait(0, True)[1] != []
    assert len(native.runs) == 1


def test_requests_run_when_the_first_has_waited_long_enough(native: Native) -> None:
    native.learn(delay_ns=1_000_000, full=ROWS)
    answers: list[AnswerRecord] = []

    def ask() -> None:
        native.send(request(1), request(2))
        wait_until(lambda: answers.extend(native.answers()) or len(answers) == 2, "answers")

    assert meanwhile(native, ask) == []
    # One of them has waited before it came here.
    native.fast.forget()
    native.learn(delay_ns=LONG_NS, full=ROWS)
    native.send(request(3, received_ns=1), request(4))
    assert native.fast.wait(0, True) == ([], [], [])
    assert [answer.request_id for answer in (*answers, *native.answers())] == [1, 2, 3, 4]
    assert len(native.runs) == 2


def test_each_parameter_set_waits_for_itself(native: Native) -> None:
    first, second = object(), object()
    native.learn(delay_ns=HOUR_NS, full=2, by_rows=(0, 0), sets={"a": first, "b": second})
    named = ["a", "b", "", "b", "b"]
    sent = [request(n + 1, parameter_set=name) for n, name in enumerate(named)]
    given = meanwhile(native, lambda: native.send(*sent), lambda: native.send(request(6)))
    assert native.chosen == [(second,), ()]
    assert [answer.request_id for answer in native.answers()] == [2, 4, 3, 6]
    assert given == [sent[0], sent[4]]


def test_enough_rows_run_without_what_is_more_until_the_time_is_over(native: Native) -> None:
    native.learn(delay_ns=LONG_NS, full=2)
    sent = [request(n) for n in range(1, 6)]
    assert meanwhile(native, lambda: native.send(*sent)) == [sent[4]]
    native.send(*[request(n, received_ns=1) for n in range(6, 9)])
    native.fast.wait(0, True)
    assert [answer.request_id for answer in native.answers()] == [1, 2, 3, 4, 6, 7, 8]
    assert len(native.runs) == 3


def test_what_waits_is_python_s_with_whatever_else_is(native: Native) -> None:
    """Before it, so that a cancelled request is known; and also where more wait than there is memory for."""
    native.learn(delay_ns=HOUR_NS, full=ROWS)
    assert meanwhile(native, lambda: native.send(request(1), request(2))) == [request(1), request(2)]
    native.send(request(3, deadline_ns=1 << 62))
    ((_, (content, _, _)),) = native.fast.wait(0, True)[1]
    assert decoder(ToWorker).decode(content[1:]) == [request(3, deadline_ns=1 << 62)]
    # An id that is lower than another one that waits may be that of a request that waits.
    given = meanwhile(native, lambda: native.send(request(5)), lambda: native.send(request(4)))
    assert [record.request_id for record in given] == [5, 4]
    native.fast.forget()
    native.learn(delay_ns=HOUR_NS, full=10)
    large = [request(n, client_id="x" * 60_000) for n in range(6, 12)]
    given = meanwhile(native, *[lambda one=one: native.send(one) for one in large])
    assert given == large[: len(given)]
    assert len(given) == 5
    assert native.answers() == []


@pytest.mark.parametrize("name", ["c", "a" * 128, "a" * 129, "\u00e4"])
def test_a_set_that_is_not_there_is_for_python_and_changes_nothing(native: Native, name: str) -> None:
    native.learn(sets={"a": object()})
    for _ in range(2):
        datagram = native.send(request(1, parameter_set="a"), request(2, parameter_set=name))
        assert native.fast.wait(0, True) == ([], [(native.lane.fileno(), (datagram, [], False))], [])
        native.send(request(3, parameter_set="a"))
        assert native.fast.wait(0, True) == ([], [], [])
    assert len(native.answers()) == 2


@pytest.mark.parametrize("mixes", [False, True])
def test_a_set_whose_run_fails_is_for_python_and_others_are_not(native: Native, mixes: bool) -> None:
    native.learn(sets={"a": object()}, mixes=mixes)
    made, native.made = native.made, failing
    native.send(request(1, parameter_set="a"), request(2, parameter_set="a"))
    ((_, (datagram, _, _)),) = native.fast.wait(0, True)[1]
    assert datagram.count(b"\xa1q") == 2
    native.made = made
    native.send(request(3), request(4, parameter_set="a"))
    assert native.fast.wait(0, True) == ([], [], [])
    assert len(native.answers()) == 2


def test_a_traced_request_that_names_a_set_is_python_s(native: Native) -> None:
    """What its timeline says of its set is not known here."""
    native.learn(sets={"a": object()})
    native.send(request(1, trace=1), request(2, trace=1, parameter_set="a"), request(3, parameter_set="a"))
    ((_, (datagram, _, _)),) = native.fast.wait(0, True)[1]
    assert datagram.endswith(encoder.encode(request(2, trace=1, parameter_set="a")))
    assert [answer.request_id for answer in native.answers()] == [1, 3]


def test_a_run_is_on_the_status_page_while_it_lasts(native: Native) -> None:
    native.learn()
    native.send(request(5), request(6))
    native.fast.wait(0, True)
    assert native.running == [[2, 7, 5, 7, 6]]
    assert native.page[WORDS] == 0
    assert native.page[0] == 1


def test_what_earlier_requests_left_stays_where_nobody_minds(native: Native) -> None:
    native.learn(clears=False)
    native.send(request(1))
    native.fast.wait(0, True)
    assert native.runs == [b"12345678" + b"\xaa" * 24]


def test_figures(native: Native) -> None:
    native.learn()
    native.send(*[request(n, received_ns=n) for n in range(1, 6)])
    native.fast.wait(0, True)
    ((owner, answered, rows, runs, request_ns, queue_ns, copied, compute_ns, sizes),) = native.fast.figures()
    assert (owner, answered, rows, runs, copied) == (native, 5, 5, 2, 5 * 16)
    # Everything that this host has done since its start was their wait; only the last bucket has room for that.
    ((protocol, counts),) = native.durations.counted().items()
    assert (protocol, counts[:4], counts[4:8]) == ("http", (0, 5, 0, request_ns), (0, 5, 0, queue_ns))
    assert (sum(counts[8:11]), counts[11]) == (5, sum(compute_ns))
    assert counts[12:] == (0, 0, 0, 0)
    assert [size[:2] for size in sizes] == [(1, 1), (4, 1)]
    # Of a run of four and one of one: each part counts for each request.
    for part in range(3):
        assert compute_ns[part] == sizes[0][2 + part] + 4 * sizes[1][2 + part]
    assert request_ns > queue_ns > sum(compute_ns)
    assert native.fast.figures() == []


@pytest.mark.parametrize(
    "odd",
    [
        request(2, form=4),
        request(2, b"1234567"),
        RequestRecord(2, 3, ()),
        RequestRecord(2, 3, (b"12345678", b"")),
        request(2, deadline_ns=1),
        request(1),
        request(44),
        Cancel(1),
        RequestRecord(2, 3, tuple([b"12345678"] * 17)),
        TraceContext(2, "1"),
        request(2, strikes=1),
        RequestRecord(2, PreparedRequest("m"), (b"12345678",)),
        request(2, sequence_id="s" * 129),
        request(2, sequence_id=-1),
        request(2, priority=-1),
        request(2, replace_key="k"),
        request(2, parameter_set="a"),
        request(2, parameter_set="main"),
    ],
    ids=[
        "form",
        "size",
        "none",
        "two",
        "late",
        "id again",
        "in flight",
        "cancel",
        "many",
        "trace",
        "struck",
        "inline",
        "long",
        "id",
        "priority",
        "replaces",
        "set",
        "main",
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_a_datagram_with_anything_else_is_python_s_affair(native: Native, odd: Any, last: bool) -> None:
    native.learn()
    native.in_flight[44] = None
    records = [request(1), odd] if last else [odd, request(99 if odd == request(1) else 100), request(1)]
    datagram = native.send(*records)
    assert native.fast.wait(0, True) == ([], [(native.lane.fileno(), (datagram, [], False))], [])
    assert (native.runs, native.answers()) == ([], [])


MOMENTS = ["QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


@pytest.mark.parametrize("trace", [1, 5])
@pytest.mark.parametrize("parameters", [None, ("main", 7)])
def test_a_traced_request_runs_with_the_others(native: Native, trace: int, parameters: tuple[str, int] | None) -> None:
    native.learn(traced=timeline_end(parameters))
    context = TraceContext(2, "a" * 32, "b" * 16)
    native.send(request(1), context, request(2, trace=trace, received_ns=3), request(3))
    assert native.fast.wait(0, True) == ([], [], [])
    first, traced, last = native.answers()
    assert (len(native.runs), first.trace, last.trace) == (1, None, None)
    assert traced.trace is not None
    names, moments = zip(*traced.trace.moments, strict=True)
    assert list(names) == MOMENTS
    assert list(moments) == sorted(moments)
    assert traced.trace == Timeline(traced.trace.moments, parameters=parameters)
    assert (traced.timing is not None) == (trace == 5)
    assert traced.contents == (turned(b"12345678"),)


@pytest.mark.parametrize(("traced", "trace"), [(None, 1), (timeline_end(None), 2), (timeline_end(None), 3)])
def test_traced_requests_that_are_python_s_cost_no_other_its_place(native: Native, traced: Any, trace: int) -> None:
    native.learn(traced=traced)
    context, odd = TraceContext(2, "a" * 32, "b" * 16), [request(2, trace=trace), request(4, trace=trace)]
    native.send(request(1), context, odd[0], request(3), odd[1])
    events, ((fd, (content, fds, flags)),), unsent = native.fast.wait(0, True)
    assert (events, fd, fds, flags, unsent) == ([], native.lane.fileno(), [], 0, [])
    assert decoder(ToWorker).decode(content[1:]) == [context, *odd]
    assert [answer.request_id for answer in native.answers()] == [1, 3]


def test_many_traced_requests_that_are_python_s_go_there_with_all_others(native: Native) -> None:
    native.learn(traced=None)
    datagram = native.send(request(1), *[request(2 + number, trace=1) for number in range(17)])
    assert native.fast.wait(0, True) == ([], [(native.lane.fileno(), (datagram, [], False))], [])


@pytest.mark.parametrize("records", [[TraceContext(2, "1"), Cancel(1)], [TraceContext(2, "1")] * 2])
def test_a_trace_belongs_to_the_request_behind_it(native: Native, records: list[Any]) -> None:
    native.learn()
    datagram = native.send(request(1), *records, request(2, trace=1))
    assert native.fast.wait(0, True) == ([], [(native.lane.fileno(), (datagram, [], False))], [])


def test_what_goes_back_has_its_trace_before_it(native: Native) -> None:
    native.learn()
    native.made = lambda: [b""]
    datagram = native.send(TraceContext(1, "1"), request(1, trace=1), request(2))
    assert native.fast.wait(0, True)[1] == [(native.lane.fileno(), (datagram, [], False))]


def test_steps_of_sequences_that_are_traced_keep_their_order(native: Native) -> None:
    native.learn(sequences=(lambda asked: len(asked), lambda described, error: None), traced=None)
    datagram = native.send(request(1, sequence_id=5), request(2, sequence_id=5, trace=1), request(3, sequence_id=5))
    assert native.fast.wait(0, True)[1] == [(native.lane.fileno(), (datagram, [], False))]


@pytest.mark.parametrize(
    "records", [[request(1, trace=1)], [TraceContext(1, "1"), request(1)], [request(1), request(2)]]
)
def test_no_client_is_traced(native: Native, records: list[Any]) -> None:
    """Not because it asks for timestamps; by what it says of a trace, or by its turn, only by Python."""
    native.fast.close(native.lane.fileno())
    native.fast.open(native.lane.fileno(), 7, native.in_flight, native.take_back, 10, 2)
    native.learn()
    native.fast.let_pass(1, True)
    datagram = native.send(*records)
    assert native.fast.wait(0, True)[1] == [(native.lane.fileno(), (datagram, [], False))]


@pytest.mark.parametrize("fields", [14, 15])
def test_a_record_may_end_before_its_replace_key_and_its_parameter_set(native: Native, fields: int) -> None:
    """They are the last fields, and nearly every request has none."""
    native.learn()
    whole = encoder.encode(request(1))
    assert (whole[:3], whole[-2:]) == (b"\xdc\x00\x10", b"\xa0\xa0")
    native.front.send(b"\x01\xdc\x00\x01" + bytes((0x90 + fields,)) + whole[3 : fields - 16])
    assert native.fast.wait(0, True) == ([], [], [])
    assert len(native.answers()) == 1


@pytest.mark.parametrize(
    "scheduling",
    [
        {"priority": 3, "timeout_us": 70_000},
        {"priority": (1 << 64) - 1, "timeout_us": (1 << 64) - 1},
        {"sequence_id": (1 << 64) - 1, "sequence_start": True},
        {"sequence_id": "s" * 128, "sequence_end": True},
    ],
    ids=["small", "largest", "number", "string"],
)
def test_scheduling_is_nothing_where_all_stand_in_one_line(native: Native, scheduling: dict[str, Any]) -> None:
    native.learn()
    native.send(request(1), request(2, **scheduling), request(3))
    assert native.fast.wait(0, True) == ([], [], [])
    assert [answer.request_id for answer in native.answers()] == [1, 2, 3]


def test_an_id_that_came_already_in_this_turn_is_python_s_affair_with_all_that_waits(native: Native) -> None:
    native.learn()
    native.send(request(1), request(5))
    native.send(request(5))
    _, datagrams, _ = native.fast.wait(0, True)
    came = [decoder(ToWorker).decode(content[1:]) for _, (content, _, _) in datagrams]
    assert came == [[request(1), request(5)], [request(5)]]
    assert (native.runs, native.answers()) == ([], [])
    # Neither an id that an answer made free, nor one of an earlier turn, is in doubt.
    for _ in range(2):
        native.send(request(5))
        assert native.fast.wait(0, True) == ([], [], [])
    assert [answer.request_id for answer in native.answers()] == [5, 5]


class AskedSpin(Spin):
    """Says for a minute that polling pays, and notes its calls."""

    def __init__(self) -> None:
        super().__init__(60_000_000_000)
        self._worth = True
        self.asked: list[tuple[str, int]] = []
        self.error: Exception | None = None

    def begin(self, now_ns: int, worked_ns: int = 0) -> int:
        self.asked.append(("begin", worked_ns))
        if self.error is not None:
            raise self.error
        return super().begin(now_ns, 0)

    def end(self, now_ns: int) -> None:
        self.asked.append(("end", now_ns - self._since_ns))
        super().end(now_ns)


def test_whether_to_look_before_sleeping_is_asked_once_for_each_wait() -> None:
    spin = AskedSpin()
    native = Native(spin)
    native.learn()
    try:
        assert native.fast.wait(0, True) == ([], [], [])
        assert spin.asked == []
        # Until the time is up, though looking on would pay.
        assert native.fast.wait(2_000_000, True) == ([], [], [])
        assert [name for name, _ in spin.asked] == ["begin", "end"]
        assert spin.asked[1][1] >= 2_000_000
        spin.asked.clear()
        # One wait for what comes at once, one for what is Python's affair.
        native.send(request(1))
        timer = threading.Timer(0.05, native.send, [b"other"])
        timer.start()
        native.fast.wait(240_000_000_000, True)
        timer.join()
        assert [name for name, _ in spin.asked] == ["begin", "end", "begin", "end"]
        assert native.runs
    finally:
        native.close()


def test_an_error_of_what_is_asked_is_told() -> None:
    spin = AskedSpin()
    spin.error = RuntimeError("it cannot be told")
    with contextlib.closing(Native(spin)) as native, pytest.raises(RuntimeError, match="it cannot be told"):
        native.fast.wait(2_000_000, True)


def test_nothing_is_served_while_others_wait_or_after_it_is_forgotten(native: Native) -> None:
    native.learn()
    native.send(request(1))
    assert native.fast.wait(0, False) == ([(native.lane.fileno(), select.EPOLLIN)], [], [])
    native.fast.forget_number(native.lane.fileno(), 3)
    assert [fd for fd, _ in native.fast.wait(0, True)[1]] == [native.lane.fileno()]
    native.learn()
    native.fast.forget()
    native.send(request(2))
    assert [fd for fd, _ in native.fast.wait(0, True)[1]] == [native.lane.fileno()]
    assert native.runs == []


def test_more_than_may_wait_is_not_decided_here(native: Native) -> None:
    native.learn(most_waiting=2)
    native.send(request(1), request(2))
    assert native.fast.wait(0, True) == ([], [], [])
    assert len(native.answers()) == 2
    native.send(request(3), request(4), request(5))
    _, ((_, (content, _, _)),), _ = native.fast.wait(0, True)
    assert decoder(ToWorker).decode(content[1:]) == [request(3), request(4), request(5)]
    assert native.answers() == []


def test_from_where_no_program_is_ready_the_rest_goes_back(native: Native) -> None:
    native.learn(by_rows=(-1, 0, 0, 0))
    native.send(*[request(n) for n in range(1, 6)])
    _, ((_, (content, _, _)),), _ = native.fast.wait(0, True)
    assert decoder(ToWorker).decode(content[1:]) == [request(5)]
    assert [answer.request_id for answer in native.answers()] == [1, 2, 3, 4]


def failing() -> list[Any]:
    raise RuntimeError("a model's own")


@pytest.mark.parametrize(
    "made",
    [failing, list, lambda: [np.zeros(31, np.uint8)], lambda: [object()], lambda: None],
    ids=["raises", "nothing", "short", "no bytes", "no list"],
)
def test_a_run_that_goes_wrong_is_python_s_affair_and_not_tried_again(native: Native, made: Any) -> None:
    native.made = made
    native.learn()
    for number in (1, 2):
        datagram = native.send(request(10 * number), request(10 * number + 1), request(10 * number + 2), request(55))
        assert native.fast.wait(0, True) == ([], [(native.lane.fileno(), (datagram, [], False))], [])
        assert native.answers() == []
    assert len(native.runs) == 1
    assert native.page[WORDS] == 0


def test_whoever_interrupts_the_process_gets_through(native: Native) -> None:
    def interrupted() -> list[Any]:
        raise KeyboardInterrupt

    native.made = interrupted
    native.learn()
    native.send(request(1))
    with pytest.raises(KeyboardInterrupt):
        native.fast.wait(0, True)


class Choices:
    """A planner that decides what the test gave it, and notes its calls."""

    def __init__(self, *given: int) -> None:
        #: How many run of each that are asked for; afterwards all of them.
        self.given = list(given)
        self.asked: list[Any] = []
        self.failed: list[Any] = []

    def choose(self, asked: list[Any]) -> int:
        self.asked.append(asked)
        return self.given.pop(0) if self.given else len(asked)

    def fail(self, requests: list[Any], error: Exception | None) -> None:
        self.failed.append((requests, error))

    @property
    def sequences(self) -> Any:
        return self.choose, self.fail


def test_of_sequences_as_many_run_as_the_planner_says(native: Native) -> None:
    choices = Choices(2, 1)
    native.learn(sequences=choices.sequences)
    own: list[dict[str, Any]] = [
        {"sequence_id": 5, "sequence_start": True},
        {"sequence_id": (1 << 64) - 1},
        {"sequence_id": "é" * 64, "sequence_end": True},
        {"sequence_id": 0},
    ]
    native.send(*[request(n + 1, bytes([n] * 8), **each) for n, each in enumerate(own)])
    assert native.fast.wait(0, True) == ([], [], [])
    assert native.answers() == [AnswerRecord(n + 1, 9, (turned(bytes([n] * 8)),)) for n in range(4)]
    asked = [(5, True, False), ((1 << 64) - 1, False, False), ("é" * 64, False, True), (0, False, False)]
    assert choices.asked == [asked, asked[2:], asked[3:]]
    assert [run[:8] for run in native.runs] == [bytes([n] * 8) for n in (0, 2, 3)]
    assert native.left == 1


def refusing(asked: list[Any]) -> int:
    raise ValueError("a defect")


@pytest.mark.parametrize("choose", [lambda asked: 0, lambda asked: -1, lambda asked: 9, refusing, lambda asked: "one"])
def test_what_the_planner_does_not_choose_goes_back_in_its_order(native: Native, choose: Any) -> None:
    """Requests behind it may be of the same sequence."""
    native.learn(sequences=(choose, choose))
    first, behind = native.send(request(1), request(2)), native.send(request(3, form=4))
    datagrams = native.fast.wait(0, True)[1]
    assert [content for _, (content, _, _) in datagrams] == [first, behind]
    assert (native.runs, native.answers(), native.left) == ([], [], 0)


@pytest.mark.parametrize("made", [failing, lambda: [np.zeros(7, np.uint8)]], ids=["raises", "short"])
def test_a_step_that_goes_wrong_is_told_and_never_given_back(native: Native, made: Any) -> None:
    choices = Choices(1)
    native.learn(sequences=choices.sequences)
    native.made = made
    native.send(request(1, received_ns=77, sequence_id=5), request(2, received_ns=78, sequence_id=6))
    assert native.fast.wait(0, True) == ([], [], [])
    (first, error), (second, _) = choices.failed
    assert (first, second) == ([(native.lane.fileno(), 1, 77)], [(native.lane.fileno(), 2, 78)])
    assert isinstance(error, RuntimeError) == (made is failing)
    assert native.answers() == []
    assert native.page[WORDS] == 0
    # From then on such requests are Python's.
    datagram = native.send(request(3, sequence_id=5))
    assert native.fast.wait(0, True)[1] == [(native.lane.fileno(), (datagram, [], False))]


def test_what_regions_lost_makes_the_answers_void(native: Native) -> None:
    region = np.arange(32, dtype=np.uint8)
    address = region.__array_interface__["data"][0]
    lost = False

    def intact() -> None:
        if lost:
            raise InvalidArgument("gone")

    native.learn(inputs=((0, 8, address),), outputs=((0, 0, 8, 8, address + 16),), intact=intact)
    native.send(RequestRecord(1, 3, ()))
    assert native.fast.wait(0, True) == ([], [], [])
    assert native.answers() == [AnswerRecord(1, 9, ())]
    assert region.tolist() == [*range(16), *[255 - n for n in range(8)], *range(24, 32)]
    lost = True
    datagram = native.send(RequestRecord(2, 3, ()))
    assert native.fast.wait(0, True)[1] == [(native.lane.fileno(), (datagram, [], False))]
    assert native.answers() == []


def test_a_region_that_is_lost_costs_its_own_form_and_no_other(native: Native) -> None:
    def gone() -> None:
        raise InvalidArgument("gone")

    region = np.zeros(8, np.uint8)
    native.learn(form=3)
    native.learn(form=4, inputs=((0, 8, region.__array_interface__["data"][0]),), intact=gone)
    lost = RequestRecord(2, 4, ())
    datagram = native.send(request(1), lost)
    assert native.fast.wait(0, True)[1] == [(native.lane.fileno(), (datagram, [], False))]
    assert native.answers() == []
    native.send(request(3))
    assert native.fast.wait(0, True) == ([], [], [])
    assert [answer.request_id for answer in native.answers()] == [3]
    runs = len(native.runs)
    datagram = native.send(RequestRecord(4, 4, ()))
    assert native.fast.wait(0, True)[1] == [(native.lane.fileno(), (datagram, [], False))]
    assert len(native.runs) == runs


def test_descriptors_go_along_and_a_datagram_that_was_cut_says_so(native: Native) -> None:
    native.learn()
    read, write = os.pipe()
    socket.send_fds(native.front, [b"\x01\x90"], [read, write])
    _, ((_, (content, fds, cut)),), _ = native.fast.wait(0, True)
    assert (content, len(fds), cut) == (b"\x01\x90", 2, False)
    assert os.fstat(fds[1]).st_ino == os.fstat(write).st_ino
    for fd in (read, write, *fds):
        os.close(fd)
    native.front.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    native.front.send(bytes(70_000))
    assert native.fast.wait(0, True)[1][0][1][2]


def test_datagrams_without_requests_are_nothing(native: Native) -> None:
    """However many there are: what they need is given back with each."""
    native.learn()
    for number in range(1, 60_000, 10_000):
        for _ in range(10_000):
            native.front.send(b"\x01\xdc\x00\x00")
            assert native.fast.wait(0, True) == ([], [], [])
        native.send(request(number))
        assert native.fast.wait(0, True) == ([], [], [])
        assert [answer.request_id for answer in native.answers()] == [number]


def test_answers_that_cannot_be_sent_are_kept_and_nothing_more_is_run(native: Native) -> None:
    native.learn()
    # As much as the socket holds.
    with contextlib.suppress(BlockingIOError):
        while native.lane.send(b"\x01\x90"):
            pass
    native.send(*[request(n) for n in range(1, 20)])
    _, ((_, (content, _, _)),), ((fd, unsent),) = native.fast.wait(0, True)
    given_back = decoder(ToWorker).decode(content[1:])
    answered = decoder(ToSubmitter).decode(unsent[1:])
    assert fd == native.lane.fileno()
    assert [record.request_id for record in (*answered, *given_back)] == list(range(1, 20))
    assert answered
    assert native.answers() == []


def test_a_lane_whose_other_end_is_gone_is_an_event(native: Native) -> None:
    native.learn()
    native.front.close()
    (event,), _, _ = native.fast.wait(0, True)
    assert event[0] == native.lane.fileno()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"inputs": ((1, 8, 0),)}, "does not fit"),
        ({"inputs": ((0, 9, 0),)}, "does not fit"),
        ({"inputs": ((-1, 8, 0),)}, "does not fit"),
        ({"inputs": ((0, 8, 0),) * 17}, "too many"),
        ({"outputs": ((0, -1, 8, 8, 0),)}, "begins nowhere"),
        ({"outputs": ((0, 0, 8, 65_536, 0),)}, "datagram"),
        ({"by_rows": ()}, "for none"),
        ({"by_rows": (1,)}, "no such program"),
        ({"form": 1024}, "below 1024"),
        ({"sets": ["a"]}, "no dict"),
        ({"by_rows": (0, -1), "sequences": (refusing, refusing)}, "any number of rows"),
    ],
)
def test_what_cannot_be_is_not_learned(native: Native, said: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        native.learn(**said)
    datagram = native.send(request(1))
    assert native.fast.wait(0, True)[1] == [(native.lane.fileno(), (datagram, [], False))]


def learn_places(native: Native) -> None:
    """Teaches the C part to answer requests of prepared number 4, with one tensor of eight bytes, with its place."""

    def run(places: Any) -> Any:
        return -1, 0, 0, [repr(places).encode().ljust(40)]

    batch = (learn_places, 7, 1000, 0.0, 0, 0, False, False, (), (-1,), None, native.histograms)
    places = ((0, 8, 0),), ((0, 0, 0, 40, 0),)
    native.fast.learn(native.lane.fileno(), 4, batch, 1, *places, 9, None, timeline_end(None), None, run)


NUMBERS = st.integers(0, (1 << 64) - 1)
records = st.one_of(
    st.builds(
        RequestRecord,
        st.integers(1, 1 << 63),
        st.integers(0, 1030),
        st.lists(st.binary(max_size=9), max_size=3).map(tuple),
        st.text(max_size=40),
        st.integers(0, 1 << 63),
        st.integers(0, 1 << 63),
    ),
    st.builds(request, st.integers(1, 1 << 63), st.binary(min_size=8, max_size=8), client_id=st.text(max_size=300)),
    st.builds(
        request,
        st.integers(1, 1 << 63),
        priority=NUMBERS,
        timeout_us=NUMBERS,
        sequence_id=NUMBERS | st.text(max_size=128),
        sequence_start=st.booleans(),
        sequence_end=st.booleans(),
        trace=st.sampled_from([0, 0, 1, 4, 5]),
        parameter_set=st.sampled_from(["", "", "main", "a", "b"]) | st.text(max_size=140),
    ),
    st.builds(
        RequestRecord,
        st.integers(1, 1 << 63),
        st.integers(3, 4),
        st.lists(st.builds(Slice, NUMBERS, NUMBERS, st.sampled_from([8, 9, 1 << 40])), max_size=2).map(tuple),
    ),
    st.builds(TraceContext, st.integers(0, 1 << 63), st.text("0123456789abcdef", max_size=32)),
    st.builds(Cancel, st.integers(0, 1 << 40)),
    st.builds(Release, st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=3).map(tuple)),
)


def answered_or_given_back(datagram: bytes) -> None:
    """Asserts that the C part answers requests of a datagram as Python reads them, and gives all others back as they came."""
    with contextlib.closing(Native()) as native:
        native.learn()
        learn_places(native)
        native.front.send(datagram)
        events, datagrams, unsent = native.fast.wait(0, True)
        answers, rest = native.answers(), b""
        progress = len(answers)
        while datagrams and progress:
            # After a run that took long, as on a slow machine, the rest is left to Python; here it comes once more.
            ((_, (rest, _, _)),) = datagrams
            native.front.send(rest)
            events, datagrams, unsent = native.fast.wait(0, True)
            more = native.answers()
            answers, progress = answers + more, len(more)
        left: list[Any] = []
        if datagrams:
            ((fd, (rest, memory, lost)),) = datagrams
            assert (fd, memory, bool(lost)) == (native.lane.fileno(), [], False)
            left = [] if rest == datagram else decoder(ToWorker).decode(rest[1:])
        if rest == datagram:
            assert not answers
        else:
            read = decoder(ToWorker).decode(datagram[1:])
            # What is traced in a way that is Python's is left to it, and the others are answered.
            assert all(record.trace > 1 for record in left if isinstance(record, RequestRecord))
            assert left == [record for record in read if record in left]
            submitted = [record for record in read if isinstance(record, RequestRecord) and record not in left]
            assert [answer.request_id for answer in answers] == [record.request_id for record in submitted]
            returned = [record for each in native.returned for record in decoder(ToWorker).decode(each[1:])]
            assert returned == [record for record in read if isinstance(record, Release)]
            for answer, record in zip(answers, submitted, strict=True):
                (content,) = record.contents
                assert (answer.trace is not None, answer.timing is not None) == (
                    record.trace & 1 > 0,
                    record.trace & 4 > 0,
                )
                if record.prepared == 3:
                    assert answer.contents == (turned(content),)
                else:
                    place = content if isinstance(content, bytes) else (content.segment, content.offset)
                    assert answer.contents == (repr((place,)).encode().ljust(40)[:40],)
        assert (events, unsent) == ([], [])


@given(st.lists(records, max_size=8), st.binary(max_size=6), st.integers(0, 60), st.booleans())
@example([RequestRecord(1, 4, (Slice(0, 0, 8),))], b"", 0, False)
@example([RequestRecord(1, 4, (b"12345678",))], b"", 0, False)
@example([TraceContext(1, "1"), RequestRecord(1, 4, (b"12345678",), trace=1)], b"", 0, False)
@example([request(1, trace=5), TraceContext(2, "1"), RequestRecord(2, 4, (Slice(0, 0, 8),), trace=5)], b"", 0, False)
def test_whatever_comes_is_answered_or_given_back_as_it_came(
    wanted: list[Any], junk: bytes, cut: int, broken: bool
) -> None:
    """The C reader never takes what Python's would read in another way."""
    datagram = b"\x01\xdc" + len(wanted).to_bytes(2, "big") + b"".join(map(encoder.encode, wanted))
    answered_or_given_back(datagram[: max(1, len(datagram) - cut)] + junk if broken else datagram)


# --------------------------------------------------------------------------------------------------- in a worker's loop


def vector(name: str, values: Any) -> Tensor:
    array = np.asarray(values, np.float32).reshape(1, -1)
    return Tensor(name, "FP32", array.shape, array.tobytes())


def ask(loop: WorkerLoop, *values: float, together: int = 1, **more: Any) -> list[WholeAnswer]:
    """Asks addsub with sixteen times each value, and sixteen times 1; returns the answers."""
    for value in values:
        for _ in range(together):
            loop.submit("addsub", [vector("INPUT0", [value] * 16), vector("INPUT1", [1] * 16)], **more)
    return loop.answers(len(values) * together)


def firsts(answers: list[WholeAnswer]) -> list[tuple[float, float]]:
    found = []
    for answer in answers:
        assert answer.code == "", answer.message
        contents = [tensor.place for tensor in answer.outputs if isinstance(tensor.place, bytes)]
        (a, b) = [float(np.frombuffer(content, np.float32)[0]) for content in contents]
        found.append((a, b))
    return found


def served(loop: WorkerLoop) -> int:
    """Returns how many requests were ever queued in Python; those that C answers are not."""
    (version,) = [version for version in loop.worker._models if version.name == "addsub"]
    return ever_queued(version.queue)


def compiled(loop: WorkerLoop) -> bool:
    """Returns whether all programs of addsub are there: that for one request, and those for several in one call."""
    model = loop.version("addsub").jitted
    assert model is not None
    assert model.grouped is not None
    return any(model.grouped.find(shapes, MOST) for shapes in model.executables.unexpected)


def known(loop: WorkerLoop, once: Callable[[], object]) -> None:
    """Asks until C answers all of it: the last program is compiled while others run, and what C knows is learned anew then."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    quiet = 0
    while quiet < 20:
        before = served(loop)
        once()
        quiet = quiet + 1 if compiled(loop) and served(loop) == before else 0
        assert time.monotonic() < deadline, "it never came about"


@pytest.mark.parametrize("together", [1, 3, 16])
def test_answers_are_those_of_python(loop: WorkerLoop, together: int) -> None:
    loop.load(MODELS / "addsub")
    first = ask(loop, 2.5)
    known(loop, lambda: ask(loop, 1.0, together=together))
    before, counted = served(loop), loop.version("addsub").statistics.success_count
    answers = ask(loop, *[2.5 + n for n in range(together)])
    assert firsts(answers) == [(3.5 + n, 1.5 + n) for n in range(together)]
    assert answers[0].outputs == first[0].outputs
    assert (served(loop), loop.version("addsub").statistics.success_count) == (before, counted + together)


def test_requests_that_differ_in_scheduling_alone_have_one_number(loop: WorkerLoop) -> None:
    """They are answered in C, traced ones too, as long as the model has one line and no sequences."""
    loop.load(MODELS / "addsub")
    known(loop, lambda: ask(loop, 1.0))
    before, minted = served(loop), loop.numbers.assigned
    for number in range(20):
        own = {"priority": number, "timeout_us": 7 * number, "sequence_id": f"s{number}", "sequence_start": True}
        assert firsts(ask(loop, float(number), own=own)) == [(number + 1, number - 1)]
    # A slow moment of the machine has a program chosen anew, which is Python's.
    assert served(loop) - before <= 5
    assert loop.numbers.assigned == minted
    before = served(loop)
    (traced,) = ask(loop, 2.0, own={"trace": 1})
    assert firsts([traced]) == [(3.0, 1.0)]
    assert traced.trace is not None
    assert [name for name, _ in traced.trace.moments] == MOMENTS
    assert served(loop) - before <= 1
    assert loop.numbers.assigned == minted


@pytest.mark.parametrize("fast", [True, False])
def test_an_id_that_is_in_flight_twice_ends_its_lane_and_no_other(loop: WorkerLoop, fast: bool) -> None:
    """In one turn, in two datagrams: in C as in Python."""
    loop.load(MODELS / "addsub")
    other = loop.open_lane(8)
    known(loop, lambda: ask(loop, 1.0, together=2))
    if not fast:
        loop.worker._poller.close_lane(next(each for each in loop.worker._submitters.values() if each.peer == 7))
    for _ in range(2):
        loop.submit("addsub", [vector("INPUT0", [2.0] * 16), vector("INPUT1", [1] * 16)])
        loop.number -= 1
        assert loop.front.flush()
    with pytest.raises(ChannelClosed):
        loop.answers(1)
    loop.number += 1
    loop.submit("addsub", [vector("INPUT0", [2.0] * 16), vector("INPUT1", [1] * 16)], lane=other)
    assert firsts(loop.answers(1, other)) == [(3.0, 1.0)]
    other.close()


def test_statistics_count_them_as_any(loop: WorkerLoop) -> None:
    loop.load(MODELS / "addsub")
    known(loop, lambda: ask(loop, 1.0, together=2))
    statistics = loop.version("addsub").statistics
    before = statistics.to_dict()
    ask(loop, 1.0, together=2)
    after = statistics.to_dict()
    for name in ("inference_count", "execution_count"):
        assert after[name] == before[name] + 2
    assert after["copied_byte_size"] == before["copied_byte_size"] + 2 * 256
    for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        figure, earlier = after["inference_stats"][name], before["inference_stats"][name]
        assert figure["count"] == earlier["count"] + 2
        assert figure["ns"] > earlier["ns"]
    (batch,) = after["batch_stats"]
    assert batch["batch_size"] == 1
    assert batch["compute_infer"]["count"] == before["batch_stats"][0]["compute_infer"]["count"] + 2


def test_a_batch_is_one_execution(loop: WorkerLoop) -> None:
    loop.load(MODELS / "mlp")
    (mlp,) = list(loop.worker._models)

    def twice() -> list[WholeAnswer]:
        for _ in range(2):
            loop.submit("mlp", [vector("x", np.linspace(0, 1, 784))])
        return loop.answers(2)

    first = twice()
    for _ in range(5):
        twice()
    before, queued = mlp.statistics.to_dict(), ever_queued(mlp.queue)
    again = twice()
    after = mlp.statistics.to_dict()
    assert ever_queued(mlp.queue) == queued
    assert [answer.outputs for answer in again] == [answer.outputs for answer in first]
    assert after["inference_count"] == before["inference_count"] + 2
    assert after["execution_count"] == before["execution_count"] + 1
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in after["batch_stats"]}
    assert sizes[2] == {b["batch_size"]: b["compute_infer"]["count"] for b in before["batch_stats"]}[2] + 1


def test_requests_that_wait_for_others_do_so_in_c(loop: WorkerLoop, tmp_path: Path) -> None:
    """Enough requests for a batch run in C; this loop does not wait, so fewer are left to Python. All are answered alike."""
    text, asked = (MODELS / "mlp" / "config.pbtxt").read_text(), "dynamic_batching { }"
    assert asked in text
    delay = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 100000 }"
    source = (MODELS / "mlp" / "1" / "model.py").read_text()
    write_model(tmp_path, "mlp", source, text.replace(asked, delay))
    loop.load(tmp_path / "mlp")
    (mlp,) = list(loop.worker._models)

    def together(count: int) -> list[WholeAnswer]:
        for _ in range(count):
            loop.submit("mlp", [vector("x", np.linspace(0, 1, 784))])
        return loop.answers(count)

    first = together(2)
    for _ in range(5):
        together(2)
    before, queued = mlp.statistics.to_dict(), ever_queued(mlp.queue)
    assert [answer.outputs for answer in together(2)] == [answer.outputs for answer in first]
    assert ever_queued(mlp.queue) == queued
    (alone,) = together(1)
    after = mlp.statistics.to_dict()
    assert ever_queued(mlp.queue) == queued + 1
    assert alone.outputs[0].shape == first[0].outputs[0].shape
    assert after["inference_count"] == before["inference_count"] + 3
    assert after["execution_count"] == before["execution_count"] + 2
    assert after["inference_stats"]["queue"]["ns"] >= before["inference_stats"]["queue"]["ns"] + 100_000_000


@pytest.mark.parametrize("preferred", [(2,), (2, 4)])
def test_batches_end_at_preferred_sizes_in_c_as_in_python(
    loop: WorkerLoop, tmp_path: Path, preferred: tuple[int, ...]
) -> None:
    """Without a delay the rows of a preferred size run first, and then the rest; C leaves to Python what is between two."""
    text, asked = (MODELS / "mlp" / "config.pbtxt").read_text(), "dynamic_batching { }"
    sizes = f"dynamic_batching {{ preferred_batch_size: {[*preferred]} }}"
    write_model(tmp_path, "mlp", (MODELS / "mlp" / "1" / "model.py").read_text(), text.replace(asked, sizes))
    loop.load(tmp_path / "mlp")
    (mlp,) = list(loop.worker._models)

    def ran(count: int) -> dict[int, int]:
        def batches() -> dict[int, int]:
            return {b["batch_size"]: b["compute_infer"]["count"] for b in mlp.statistics.to_dict()["batch_stats"]}

        before = batches()
        for _ in range(count):
            loop.submit("mlp", [vector("x", np.linspace(0, 1, 784))])
        loop.answers(count)
        new = {size: times - before.get(size, 0) for size, times in batches().items()}
        return {size: times for size, times in new.items() if times}

    expected = {1: {1: 1}, 2: {2: 1}, 3: {2: 1, 1: 1}, 4: {2: 2}, 5: {2: 2, 1: 1}}
    if 4 in preferred:
        expected |= {4: {4: 1}, 5: {4: 1, 1: 1}}
    for _ in range(4):
        assert {count: ran(count) for count in expected} == expected
    queued = ever_queued(mlp.queue)
    # What runs at once is C's; between two runs it may ask Python whose turn it is.
    for count in 1, *preferred:
        ran(count)
    assert ever_queued(mlp.queue) == queued
    if 4 in preferred:
        ran(3)
        assert ever_queued(mlp.queue) > queued


def test_a_model_loaded_again_answers_from_then_on(loop: WorkerLoop, tmp_path: Path) -> None:
    folder = tmp_path / "addsub"
    (folder / "1").mkdir(parents=True)
    for name in ("config.pbtxt", "1/model.py"):
        (folder / name).write_text((MODELS / "addsub" / name).read_text())
    loop.load(folder)
    known(loop, lambda: ask(loop, 1.0))
    text = (folder / "1" / "model.py").read_text()
    assert " - " in text
    (folder / "1" / "model.py").write_text(text.replace(" - ", " * "))
    loop.load(folder)
    assert firsts(ask(loop, 5.0)) == [(6.0, 5.0)]
    known(loop, lambda: ask(loop, 1.0))
    assert firsts(ask(loop, 5.0)) == [(6.0, 5.0)]


@pytest.fixture
def region() -> Iterator[tuple[str, mmap.mmap, int]]:
    key = f"/tensord-test-{os.getpid()}"
    made = posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=4096)
    try:
        with mmap.mmap(made.fd, 4096) as mapping:
            yield key, mapping, made.fd
    finally:
        os.close(made.fd)
        posix_ipc.unlink_shared_memory(key)


def in_region(loop: WorkerLoop) -> list[WholeAnswer]:
    inputs = [Tensor("INPUT0", "FP32", (1, 16), RegionSlice("r", 64, 64)), vector("INPUT1", [1] * 16)]
    outputs = (RequestedOutput("OUTPUT0", RegionSlice("r", 128, 100)), RequestedOutput("OUTPUT1"))
    loop.submit("addsub", inputs, outputs)
    return loop.answers(1)


def call(loop: WorkerLoop, operation: Any) -> Reply:
    loop.tell(ControlCall(1, operation))
    reply: Reply = loop.hear(Reply)
    return reply


def test_regions(loop: WorkerLoop, region: tuple[str, mmap.mmap, int]) -> None:
    key, mapping, fd = region
    loop.load(MODELS / "addsub")
    assert call(loop, RegisterSystemRegion("r", key, 0, 4096)).code == ""
    mapping[64:128] = np.arange(16, dtype=np.float32).tobytes()
    known(loop, lambda: in_region(loop))
    mapping[64:128] = np.arange(10, 26, dtype=np.float32).tobytes()
    mapping[128:256] = bytes(128)
    before = served(loop)
    (answer,) = in_region(loop)
    assert served(loop) == before
    assert np.frombuffer(mapping[128:192], np.float32).tolist() == list(range(11, 27))
    assert mapping[192:256] == bytes(64)
    whole, own = answer.outputs
    assert whole.place == RegionSlice("r", 128, 100)
    assert np.frombuffer(own.place, np.float32).tolist() == list(range(9, 25))  # type: ignore[union-attr]

    # Its owner takes the memory away: that is found, said, and no reason to end.
    os.ftruncate(fd, 0)
    for _ in range(2):
        (answer,) = in_region(loop)
        assert answer.code == "INVALID_ARGUMENT"
        assert "lost its memory" in answer.message
    assert call(loop, UnregisterRegion("system", "r")).code == ""
    (answer,) = in_region(loop)
    assert answer.code == "NOT_FOUND"
    os.ftruncate(fd, 4096)
    assert call(loop, RegisterSystemRegion("r", key, 0, 4096)).code == ""
    assert in_region(loop)[0].code == ""


def test_another_region_of_the_same_name(loop: WorkerLoop, region: tuple[str, mmap.mmap, int]) -> None:
    key, mapping, _ = region
    loop.load(MODELS / "addsub")
    assert call(loop, RegisterSystemRegion("r", key, 0, 4096)).code == ""
    known(loop, lambda: in_region(loop))
    other = posix_ipc.SharedMemory(key + "-b", posix_ipc.O_CREX, size=4096)
    try:
        with mmap.mmap(other.fd, 4096) as there:
            there[64:128] = np.full(16, 5, np.float32).tobytes()
            assert call(loop, UnregisterRegion("system", "r")).code == ""
            assert call(loop, RegisterSystemRegion("r", key + "-b", 0, 4096)).code == ""
            for _ in range(4):
                in_region(loop)
            assert np.frombuffer(there[128:192], np.float32).tolist() == [6.0] * 16
            assert mapping[64:128] == bytes(64)
    finally:
        os.close(other.fd)
        posix_ipc.unlink_shared_memory(key + "-b")


def test_two_fronts_and_one_that_goes(loop: WorkerLoop) -> None:
    loop.load(MODELS / "addsub")
    other = loop.open_lane(8)
    known(loop, lambda: ask(loop, 1.0))
    inputs = [vector("INPUT0", [1] * 16), vector("INPUT1", [1] * 16)]
    for _ in range(4):
        loop.submit("addsub", inputs, lane=other)
        assert firsts(loop.answers(1, other)) == [(2.0, 0.0)]
    loop.submit("addsub", inputs, lane=other)
    loop.submit("addsub", inputs)
    assert other.flush()
    assert firsts(loop.answers(1)) == [(2.0, 0.0)]
    other.close()
    loop.worker.iterate()
    known(loop, lambda: ask(loop, 1.0))
    assert firsts(ask(loop, 7.0)) == [(8.0, 6.0)]


def test_a_form_whose_number_means_another_one(loop: WorkerLoop) -> None:
    loop.load(MODELS / "addsub")
    known(loop, lambda: ask(loop, 1.0))
    loop.numbers = Numbers()  # it numbers from the beginning
    outputs = (RequestedOutput("OUTPUT1"),)
    loop.submit("addsub", [vector("INPUT0", [4] * 16), vector("INPUT1", [1] * 16)], outputs)
    (answer,) = loop.answers(1)
    assert [tensor.name for tensor in answer.outputs] == ["OUTPUT1"]
