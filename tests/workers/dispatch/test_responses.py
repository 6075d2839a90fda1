"""Responses on the loop: in order where the arena is full, given up in time, and dropped where nobody waits.

What works on a request stops where a response to it cannot be sent, and where it is cancelled between two of its rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from tensord.config.model_config import parse_pbtxt
from tensord.config.options import Arenas
from tensord.shm.arena import Arena
from tensord.shm.channel import pair
from tensord.shm.control_records import Unload, Unloaded
from tensord.shm.errors import Cancelled, DeadlineExceeded, Internal, Unavailable
from tensord.shm.lane import SubmitterLane, WorkerLane
from tensord.shm.regions import Leased
from tensord.workers.dispatch import dispatcher
from tensord.workers.dispatch.outbox import Outbox
from tensord.workers.dispatch.responses import Responses
from tensord.workers.imports import import_system
from tensord.workers.models.execution import Execution
from tensord.workers.models.statistics import VersionStatistics
from tensord.workers.requests.request import Request
from tensord.workers.requests.response_sender import NOT_COMPLETED, ResponseSender
from tensord.workers.requests.result import STREAMED
from tensord.workers.requests.submitter_link import SubmitterLink
from tensord.workers.scheduling.agenda import NEVER, Agenda
from tensord.workers.tensors.signature import signature
from tests.fakes import whole_answers
from tests.open_files import no_descriptors_left
from tests.records import Tensor, WholeAnswer
from tests.repositories import ensemble, fields, write_model
from tests.workers.dispatch.test_outbox import MEBIBYTE, ALane, Version
from tests.workers.made_requests import request_of
from tests.workers.worker_loop import PATIENCE_SECONDS, WorkerLoop

ARENAS = Arenas(byte_size=MEBIBYTE, max_byte_size=MEBIBYTE, inline_byte_size=0, wait=1.0)
#: Of the arena there is room for four.
LARGE = 200_000


class Bench:
    """Responses of one request, on a loop whose iterations and time the test controls."""

    def __init__(self) -> None:
        config = parse_pbtxt('name: "m" output { name: "y" data_type: TYPE_UINT8 dims: [ -1 ] }', "m")
        self.version = Version(
            name="m", version=1, statistics=VersionStatistics("m", 1), signature=signature(config, {}, {}), senders={}
        )
        self.now_ns = 0
        self.posted: list[Any] = []
        self.lane = ALane()
        self.submitter: SubmitterLink[Request] = SubmitterLink(1, cast(Any, self.lane))
        #: The requests of which a response could not be sent.
        self.withdrawn: list[Request] = []
        self.responses = self._responses(ARENAS)

    def _responses(self, arenas: Arenas) -> Responses:
        outbox, most = Outbox(arenas, Agenda(), lambda request: None), 100 * MEBIBYTE
        return Responses(arenas, outbox, self.posted.append, lambda: self.now_ns, most, self.withdrawn.append)

    def ask(self, request_id: int = 1) -> ResponseSender:
        request = request_of({}, version=self.version, submitter=self.submitter, request_id=request_id)
        self.submitter.in_flight[request_id] = request
        self.responses.open([request], 0)
        return self.version.senders[request]

    def turn(self) -> None:
        posted, self.posted[:] = list(self.posted), []
        # What came without a call is looked for after a moment.
        self.now_ns += 1_000_000
        self.responses.gather(self.now_ns)
        for call in posted:
            call()

    def returned(self, sender: ResponseSender, result: Any = STREAMED) -> Execution:
        execution = Execution([sender.request], 0)
        execution.results = [result]
        self.responses.returned(execution)
        return execution

    def sent(self) -> list[tuple[int, str, bool]]:
        """Returns first byte, code and final mark of each response."""
        found = []
        for completion in self.lane.sent:
            value = -1
            if completion.lease is not None:
                place = cast(Any, completion.outputs[0].place)
                value = self.lane.arena.segments[place.segment].view[place.offset]
            found.append((value, completion.code, completion.final))
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.lane.arena.close()


def large(value: int) -> dict[str, np.ndarray]:
    return {"y": np.full(LARGE, value, np.uint8)}


def test_what_finds_no_room_waits_in_its_order(bench: Bench) -> None:
    sender = bench.ask()
    for value in range(6):
        sender.send(large(value))
    sender.send({"y": np.full(4, 9, np.uint8)}, final=True)
    bench.turn()
    assert bench.sent() == [(value, "", False) for value in range(4)]
    assert bench.responses.kept
    bench.lane.take()
    bench.responses.retry(bench.now_ns)
    assert bench.responses.next_give_up_ns < NEVER
    assert [value for value, _, _ in bench.sent()] == [1, 2, 3, 4]
    bench.lane.take()
    bench.lane.take()
    bench.responses.retry(bench.now_ns)
    assert bench.responses.next_give_up_ns == NEVER
    assert bench.sent() == [(3, "", False), (4, "", False), (5, "", False), (9, "", True)]
    assert (bench.version.senders, bench.submitter.in_flight) == ({}, {})


def test_what_waits_too_long_ends_its_request(bench: Bench) -> None:
    sender = bench.ask()
    for value in range(6):
        sender.send(large(value))
    bench.turn()
    bench.now_ns = 2_000_000_000
    bench.responses.retry(bench.now_ns)
    assert bench.responses.next_give_up_ns == NEVER
    assert bench.sent()[4:] == [(-1, "UNAVAILABLE", True)]
    assert sender.is_cancelled
    assert bench.withdrawn == [sender.request]
    sender.send(large(5))
    bench.turn()
    assert len(bench.sent()) == 5
    assert bench.version.statistics.fail.count == 0  # its first responses were good


@pytest.mark.parametrize("returned", [False, True])
def test_regions_stay_leased_until_the_model_cannot_read_them_any_more(bench: Bench, returned: bool) -> None:
    """A response that finds no room ends the request, whose model reads its inputs until it returns."""
    sender = bench.ask()
    region = Leased()
    region.lease()
    sender.request.regions = [cast(Any, region)]
    sender.returned = returned
    for value in range(6):
        sender.send(large(value))
    bench.turn()
    bench.now_ns = 2_000_000_000
    bench.responses.retry(bench.now_ns)
    assert not sender.request.is_open
    assert region.leases == (0 if returned else 1)
    assert bench.returned(sender).streamed == [sender.request]
    assert region.leases == 0


def test_one_wake_up_for_all_that_came(bench: Bench) -> None:
    sender = bench.ask()
    for _ in range(5):
        sender.send({"y": np.zeros(4, np.uint8)})
    assert len(bench.posted) == 1
    bench.turn()
    # Others are looked for in a moment, a last one wakes at once.
    sender.send({"y": np.zeros(4, np.uint8)})
    assert bench.posted == []
    assert bench.responses.look_ns > 0
    bench.now_ns = 1 << 40
    bench.responses.gather(bench.now_ns)
    assert len(bench.lane.sent) == 6
    sender.send(None, final=True)
    assert len(bench.posted) == 1
    bench.turn()
    assert bench.lane.sent[-1] == WholeAnswer(bench.lane.sent[-1].request_id)


def test_nobody_waits_any_more(bench: Bench) -> None:
    """While the model runs it is told; once it has returned the request is over, whether it says so or not."""
    sender, other = bench.ask(1), bench.ask(2)
    for each in (sender, other):
        each.request.cancelled = True
        bench.responses.cancelled(each.request)
        assert each.is_cancelled
        assert not each.ended
    sender.send({"y": np.zeros(4, np.uint8)}, final=True)
    bench.turn()
    bench.returned(other)
    assert [(completion.request_id, completion.code) for completion in bench.lane.sent] == [
        (1, "CANCELLED"),
        (2, "CANCELLED"),
    ]
    assert bench.version.statistics.fail.count == 2


@pytest.mark.parametrize(("result", "message"), [(Internal("bad"), "bad"), ({}, NOT_COMPLETED)])
def test_what_a_model_returns_for_one_it_should_have_answered(bench: Bench, result: Any, message: str) -> None:
    sender = bench.ask()
    execution = bench.returned(sender, result)
    assert (execution.requests, execution.streamed) == ([], [sender.request])
    (completion,) = bench.lane.sent
    assert (completion.message, completion.final) == (message, True)


@pytest.mark.parametrize("ends", [False, True])
def test_a_models_error_comes_behind_what_waits_for_room(bench: Bench, ends: bool) -> None:
    """If the model has ended the request before, that it fails then is not said, whether its responses have left or not."""
    sender = bench.ask()
    for value in range(5):
        sender.send(large(value))
    sender.send(large(5), final=ends)
    bench.returned(sender, Internal("bad"))
    assert bench.sent() == [(value, "", False) for value in range(4)]
    for _ in range(4):
        bench.lane.take()
    bench.responses.retry(bench.now_ns)
    assert bench.responses.next_give_up_ns == NEVER
    error = [] if ends else [(-1, Internal.code, True)]
    assert bench.sent() == [(4, "", False), (5, "", ends), *error]
    assert (bench.version.senders, bench.submitter.in_flight) == ({}, {})


def test_a_models_error_does_not_wait_where_nobody_waits_for_its_responses(bench: Bench) -> None:
    sender = bench.ask()
    for value in range(5):
        sender.send(large(value))
    bench.turn()
    sender.request.cancelled = True
    bench.responses.cancelled(sender.request)
    bench.returned(sender, Internal("bad"))
    assert bench.sent()[4:] == [(-1, Cancelled.code, True)]
    assert (bench.version.senders, bench.submitter.in_flight, bench.responses.kept) == ({}, {}, {})


def test_a_response_that_cannot_be_placed_is_an_error_and_others_follow(bench: Bench) -> None:
    sender = bench.ask()
    sender.send({"y": np.zeros(2, np.complex128)})
    sender.send({"y": np.ones(4, np.uint8)}, final=True)
    bench.turn()
    assert [(value, code != "", final) for value, code, final in bench.sent()] == [(-1, True, False), (1, False, True)]
    assert bench.version.statistics.to_dict()["response_stats"]["0"]["fail"]["count"] == 1


class SmallBench(Bench):
    """A bench with a real lane, on which small responses are sent inside the records."""

    def __init__(self) -> None:
        super().__init__()
        ours, theirs = pair()
        self.requests = Arena(MEBIBYTE, MEBIBYTE, 0)
        self.front = SubmitterLane(ours, self.requests)
        self.worker = WorkerLane(theirs, MEBIBYTE, MEBIBYTE, 0)
        self.submitter = SubmitterLink(1, self.worker)
        arenas = msgspec.structs.replace(ARENAS, inline_byte_size=64)
        self.responses = self._responses(arenas)

    def meet(self) -> None:
        """Sends a request's response first, so that later ones like it are encoded where they are sent."""
        sender = self.ask(99)
        sender.send({"y": np.zeros(4, np.uint8)})
        sender.send(None, final=True)
        self.turn()
        assert [answer.final for answer in self.answers()] == [False, True]

    def answers(self) -> list[WholeAnswer]:
        assert self.worker.flush()
        answers: list[WholeAnswer] = []
        while (received := self.front.receive()) is not None:
            answers += whole_answers(received)
        return answers

    def close(self) -> None:
        self.front.close()
        self.worker.close()
        self.requests.close()
        self.lane.arena.close()


@pytest.fixture
def small_bench() -> Iterator[SmallBench]:
    made = SmallBench()
    yield made
    made.close()


def content(answer: WholeAnswer) -> bytes:
    place = answer.outputs[0].place
    return place if isinstance(place, bytes) else b""


def test_small_ones_are_as_they_were_when_they_were_sent(small_bench: SmallBench) -> None:
    """A model writes to its array again, its shape changes, another request's come between, and one is too large for a record."""
    small_bench.meet()
    sender, other = small_bench.ask(1), small_bench.ask(2)
    buffer = np.zeros(4, np.uint8)
    for number in range(3):
        buffer[:] = number
        sender.send({"y": buffer})
    sender.send({"y": np.full(2, 3, np.uint8)})
    other.send({"y": np.full(4, 9, np.uint8)})
    sender.send({"y": np.full(65, 4, np.uint8)})
    sender.send({"y": np.full(4, 5, np.uint8)}, final=True)
    small_bench.turn()
    answers = small_bench.answers()
    mine = [answer for answer in answers if answer.request_id == 1]
    assert [content(answer) for answer in mine] == [bytes(4), bytes([1] * 4), bytes([2] * 4), b"\3\3", b"", b"\5" * 4]
    assert mine[4].lease is not None
    assert [answer.outputs[0].shape for answer in mine] == [(4,), (4,), (4,), (2,), (65,), (4,)]
    assert [answer.final for answer in mine] == [False] * 5 + [True]
    assert [content(answer) for answer in answers if answer.request_id == 2] == [b"\t" * 4]
    assert (sender.ended, other.ended) == (True, False)


def test_small_ones_wait_behind_one_that_finds_no_room(small_bench: SmallBench) -> None:
    small_bench.meet()
    sender = small_bench.ask()
    for value in range(6):
        sender.send(large(value))
    for value in range(3):
        sender.send({"y": np.full(4, value, np.uint8)})
    small_bench.turn()
    placed = small_bench.answers()
    assert all(answer.lease is not None for answer in placed)
    assert small_bench.responses.kept
    for answer in placed:
        if answer.lease is not None:
            small_bench.front.release(answer.lease)
    assert small_bench.front.flush()
    assert small_bench.worker.receive() == []
    small_bench.responses.retry(small_bench.now_ns)
    assert small_bench.responses.next_give_up_ns == NEVER
    assert [len(content(answer)) for answer in small_bench.answers()] == [0] * (6 - len(placed)) + [4] * 3


def test_small_ones_that_nobody_waits_for_are_dropped(small_bench: SmallBench) -> None:
    small_bench.meet()
    sender = small_bench.ask()
    for _ in range(3):
        sender.send({"y": np.zeros(4, np.uint8)})
    sender.request.cancelled = True
    sender.send(None, final=True)
    small_bench.turn()
    (answer,) = small_bench.answers()
    assert (answer.code, answer.final, sender.count) == ("CANCELLED", True, 0)


def test_one_that_cannot_be_sent_ends_its_request(small_bench: SmallBench) -> None:
    """A response that cannot be sent ends its request with one error; nothing behind it is sent. Other requests go on."""
    small_bench.meet()
    sender, other = small_bench.ask(1), small_bench.ask(2)
    for value in (4, LARGE, 4):
        sender.send({"y": np.zeros(value, np.uint8)})
    other.send({"y": np.full(4, 9, np.uint8)}, final=True)
    with no_descriptors_left():
        small_bench.turn()
    answers = [(answer.request_id, answer.code, answer.final) for answer in small_bench.answers()]
    assert answers == [(1, "", False), (1, Unavailable.code, True), (2, "", True)]
    assert small_bench.withdrawn == [sender.request]
    assert (small_bench.version.senders, small_bench.submitter.in_flight) == ({}, {})
    assert small_bench.worker.arena.statistics()["leases"] == 0


# ------------------------------------------------------------------------------------------------------- in a worker's loop

_STREAMS = "model_transaction_policy { decoupled: true }"
_CONFIG = fields("n INT32 1", "y INT32 -1", _STREAMS)
#: A response has ``n`` elements, and no one is the last.
_ENDLESS = """
    import numpy as np

    host = True
    inputs, outputs = {"n": "INT32[1]"}, {"y": "INT32[w]"}

    def create(path, config, device):
        def apply(params, inputs):
            while True:
                yield {"y": np.zeros(inputs["n"][0], np.int32)}
        return apply, {}
"""
_ROUNDS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                n = pb_utils.get_input_tensor_by_name(request, "n").as_numpy()[0]
                answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(n, np.int32))])
                request.get_response_sender().send(answer)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
"""
#: A model that calls the endless one, and does not ask whether its own request is cancelled.
_CALLS = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                n, sender = pb_utils.get_input_tensor_by_name(request, "n"), request.get_response_sender()
                asked = pb_utils.InferenceRequest(model_name="endless", requested_output_names=["y"], inputs=[n])
                for each in asked.exec(decoupled=True):
                    if not each.has_error():
                        sender.send(pb_utils.InferenceResponse(each.output_tensors()))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


#: The same as a coroutine, whose thread must not wait in ``send``.
_COROUTINE = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        async def execute(self, requests):
            for request in requests:
                n, sender = pb_utils.get_input_tensor_by_name(request, "n"), request.get_response_sender()
                asked = pb_utils.InferenceRequest(model_name="endless", requested_output_names=["y"], inputs=[n])
                for each in await asked.async_exec(decoupled=True):
                    if not each.has_error():
                        sender.send(pb_utils.InferenceResponse(each.output_tensors()))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def load_endless(loop: WorkerLoop, repository: Path, name: str) -> None:
    """Loads a model whose requests have no end, with the model that it asks."""
    import_system.prepare()
    write_model(repository, "endless", _ENDLESS, 'backend: "jax"')
    write_model(repository, "calls", _CALLS, _CONFIG)
    write_model(repository, "coroutine", _COROUTINE, _CONFIG)
    write_model(repository, "rounds", _ROUNDS, _CONFIG + "sequence_batching { iterative_sequence: true oldest { } }")
    steps = [("endless", {"n": "n"}, {"y": "y"})]
    ensemble(repository, "chain", ["n INT32 1"], ["y INT32 -1"], steps, more=_STREAMS)
    for each in dict.fromkeys(("endless", name)):
        loop.load(repository / each)


def submit(loop: WorkerLoop, model: str, n: int) -> int:
    return loop.submit(model, [Tensor("n", "INT32", (1,), np.array([n], np.int32).tobytes())])


def rest(loop: WorkerLoop) -> list[WholeAnswer]:
    """Runs the loop until no model has a request; returns what is answered meanwhile."""
    answers: list[WholeAnswer] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(version.busy for version in loop.worker._models):
        assert time.monotonic() < deadline, "a model has a request still"
        loop.worker.iterate()
        while (received := loop.front.receive()) is not None:
            answers += whole_answers(received)
    return answers


#: Ways to leave a call of the endless model. It is kept, so that nobody but the worker ends it.
_HOST = """
    from tensord import models

    host = True
    inputs, outputs, kept = {"n": "INT32[1]"}, {"y": "INT32[w]"}, []

    def create(path, config, device):
        def apply(params, inputs):
            kept.append(models.stream("endless", inputs))
            END
        return apply, {}
"""
_TRITON = """
    import triton_python_backend_utils as pb_utils

    kept = []

    class TritonPythonModel:
        ASYNC def execute(self, requests):
            (request,) = requests
            n = pb_utils.get_input_tensor_by_name(request, "n")
            asked = pb_utils.InferenceRequest(model_name="endless", requested_output_names=["y"], inputs=[n])
            kept.append(asked.exec(decoupled=True))
            END
"""
_ANSWERS = 'return [pb_utils.InferenceResponse([pb_utils.Tensor("y", n.as_numpy())])]'
_FAILS = 'raise ValueError("no")'
#: A thread of the model's own ends the request, after ``execute`` has returned.
_LATER = """import threading
            send, last = request.get_response_sender().send, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            threading.Timer(0.05, send, kwargs={"flags": last}).start()"""
#: One request goes round again, another one runs until there is a file.
_ROUND = """import os, time
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            while n.as_numpy()[0] == 2 and not os.path.exists("OPEN"):
                time.sleep(0.001)
            if n.as_numpy()[0] == 2:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
                request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)"""
#: The request ends before the call begins.
_LATE = _TRITON.replace(
    "n = ",
    "request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)\n            n = ",
    1,
)


@pytest.mark.parametrize(
    ("source", "end", "config", "fails"),
    [
        (_HOST, _FAILS, 'backend: "jax"', True),
        (_HOST, 'return {"y": inputs["n"]}', 'backend: "jax"', False),
        (_HOST, 'yield {"y": inputs["n"]}', 'backend: "jax"', False),
        (_HOST, f'yield {{"y": inputs["n"]}}; {_FAILS}', 'backend: "jax"', True),
        (_TRITON, _FAILS, fields("n INT32 1", "y INT32 -1"), True),
        (_TRITON, _ANSWERS, fields("n INT32 1", "y INT32 -1"), False),
        (_TRITON, _FAILS, _CONFIG, True),
        (_TRITON, _LATER, _CONFIG, False),
        (_TRITON.replace("ASYNC", "async"), _FAILS, _CONFIG, True),
        (_LATE, "return", _CONFIG, False),
        (_LATE.replace("ASYNC", "async"), "return", _CONFIG, False),
    ],
)
def test_a_call_ends_with_the_request_that_left_it(
    loop: WorkerLoop, tmp_path: Path, source: str, end: str, config: str, fails: bool
) -> None:
    load_endless(loop, tmp_path, "endless")
    write_model(tmp_path, "leaves", source.replace("END", end).replace("ASYNC ", ""), config)
    loop.load(tmp_path / "leaves")
    submit(loop, "leaves", 1)
    assert loop.front.flush()
    while not (answers := rest(loop)):
        loop.worker.iterate()
    assert (answers[-1].final, bool(answers[-1].code)) == (True, fails)
    assert not loop.worker._dispatcher.calls._open
    loop.tell(Unload("leaves", 1))
    loop.hear(Unloaded)
    gc.collect()  # what the model kept of its call goes while the loop is there


@pytest.mark.parametrize("model", ["endless", "rounds", "chain", "calls"])
def test_whatever_works_on_a_request_of_which_a_response_cannot_be_sent_stops(
    loop: WorkerLoop, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input's region is leased no longer, either."""
    region, checked = Leased(), dispatcher.validate

    def validate(*words: Any) -> Any:
        request = checked(*words)
        region.lease()
        request.regions = [region]
        return request

    monkeypatch.setattr(dispatcher, "validate", validate)
    load_endless(loop, tmp_path, model)
    asked = submit(loop, model, 100_000)
    with no_descriptors_left():
        answers = loop.answers(1)
    assert [(each.request_id, each.code, each.final) for each in answers] == [(asked, Unavailable.code, True)]
    assert rest(loop) == []
    assert region.leases == 0
    other = submit(loop, model, 1)
    assert not any(each.code for each in loop.answers(2))
    loop.front.cancel(other)
    assert loop.front.flush()
    assert [each.code for each in rest(loop) if each.final] == [Cancelled.code]


def test_a_request_that_is_cancelled_between_two_rounds_leaves_nothing(loop: WorkerLoop, tmp_path: Path) -> None:
    """Responses that nobody takes keep its model from another round."""
    load_endless(loop, tmp_path, "rounds")
    for n in (1, 100_000):
        asked = submit(loop, "rounds", n)
        loop.answers(3)
        loop.front.cancel(asked)
        assert loop.front.flush()
        assert [each.code for each in rest(loop) if each.final] == [Cancelled.code]


def test_a_request_that_is_late_between_two_rounds_leaves_no_call(loop: WorkerLoop, tmp_path: Path) -> None:
    load_endless(loop, tmp_path, "endless")
    rounds = _TRITON.replace("END", _ROUND.replace("OPEN", str(tmp_path / "open"))).replace("ASYNC ", "")
    write_model(tmp_path, "leaves", rounds, _CONFIG + "sequence_batching { iterative_sequence: true oldest { } }")
    loop.load(tmp_path / "leaves")
    inputs = [Tensor("n", "INT32", (1,), np.ones(1, np.int32).tobytes())]
    late = loop.submit("leaves", inputs, own={"deadline_ns": time.monotonic_ns() + 300_000_000})
    other = submit(loop, "leaves", 2)
    assert [(each.request_id, each.code) for each in loop.answers(1)] == [(late, DeadlineExceeded.code)]
    calls = loop.worker._dispatcher.calls
    assert late not in [call.requests[0].request_id for call in calls._open]
    (tmp_path / "open").touch()
    assert [(each.request_id, each.final) for each in rest(loop)] == [(other, True)]
    assert not calls._open
    loop.tell(Unload("leaves", 1))
    loop.hear(Unloaded)
    gc.collect()  # what the model kept of its calls goes while the loop is there


def test_whatever_a_coroutine_asks_for_a_client_that_is_far_behind_stops(loop: WorkerLoop, tmp_path: Path) -> None:
    load_endless(loop, tmp_path, "coroutine")
    submit(loop, "coroutine", 5000)
    answers: list[WholeAnswer] = []
    while not (answers and answers[-1].final):
        answers += loop.answers(1)
    assert answers[-1].code == Unavailable.code
    assert rest(loop) == []
    loop.tell(Unload("coroutine", 1))
    loop.hear(Unloaded)
