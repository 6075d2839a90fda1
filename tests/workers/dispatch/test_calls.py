"""Calls from model to model in a worker's loop, where the moment at which each comes matters."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from tensord.shm.control_records import ControlCall, Reply
from tensord.shm.errors import Cancelled, ServingError
from tensord.shm.operations import ModelReady
from tensord.workers.calls.caller import Caller, ModelPort, calling
from tensord.workers.imports import import_system
from tensord.workers.requests.request import Request
from tensord.workers.requests.submitter_link import SubmitterLink
from tests.records import Tensor
from tests.repositories import applying, fields, write_model
from tests.workers.made_requests import request_of
from tests.workers.worker_loop import WorkerLoop

#: Notes that it runs, holds its call until there is a file "open", and then makes it, if any is to be made.
CALLS = """
    import time
    from pathlib import Path
    from tensord import models

    host = True
    inputs = {"x": "FP32[1]"}
    outputs = {"y": "FP32[1]"}

    def create(path, config, device):
        folder = Path(path).parent
        def apply(params, inputs):
            (folder / "begun").touch()
            while not (folder / "open").exists():
                time.sleep(0.001)
            if inputs["x"][0]:
                models.call("MODEL", {"x": inputs["x"] - 1})
            return {"y": inputs["x"]}
        return apply, None
"""
FIRST, MIDDLE, BESIDE = "first", "middle", "beside"


def test_only_a_call_of_the_circle_ends_it(loop: WorkerLoop, tmp_path: Path) -> None:
    """
    1. ``first`` calls ``middle``. 2. ``middle`` calls ``first``, which is a circle. 3. Before the worker looks, ``beside`` calls
    ``middle`` as well.
    Result: the circle is refused. The call of ``beside``, the newest, only waits for it, and is answered.
    """
    for name, called in ((FIRST, MIDDLE), (MIDDLE, FIRST), (BESIDE, MIDDLE)):
        write_model(tmp_path, name, CALLS.replace("MODEL", called))
        loop.load(tmp_path / name)

    def begins(name: str) -> None:
        while not (tmp_path / name / "begun").exists():
            loop.worker.iterate()

    def opens(name: str, calls: int) -> None:
        """Has a model make its call, which the loop has yet to see then, as the last of so many."""
        (tmp_path / name / "open").touch()
        while len(loop.worker._inbox._calls) < calls:
            time.sleep(0.001)

    in_a_circle, other = (loop.submit(name, [_tensor(x)]) for name, x in ((FIRST, 3.0), (BESIDE, 1.0)))
    assert loop.front.flush()
    begins(FIRST)
    begins(BESIDE)
    (tmp_path / FIRST / "open").touch()
    begins(MIDDLE)
    opens(MIDDLE, 1)
    opens(BESIDE, 2)
    answers = {answer.request_id: answer for answer in loop.answers(2)}
    assert "waits for itself (first -> middle -> first)" in answers[in_a_circle].message
    assert answers[other].message == ""


def _tensor(x: float) -> Tensor:
    return Tensor("x", "FP32", (1,), np.array([x], np.float32).tobytes())


def test_a_call_waits_for_a_model_that_the_worker_is_to_load_after_others(loop: WorkerLoop, tmp_path: Path) -> None:
    """
    1. ``first`` calls ``middle``, which the worker does not know, for two requests. 2. The first one is cancelled.
    3. The supervisor sends the load, and replies. Result: only the second call is answered, by ``middle``.
    """
    write_model(tmp_path, FIRST, CALLS.replace("MODEL", MIDDLE))
    write_model(tmp_path, MIDDLE, applying('return {"y": inputs["x"]}', "x FP32[1]", "y FP32[1]"))
    loop.load(tmp_path / FIRST)
    (tmp_path / FIRST / "open").touch()

    def asks() -> tuple[int, ControlCall]:
        number = loop.submit(FIRST, [_tensor(3.0)])
        assert loop.front.flush()
        call = loop.hear(ControlCall)
        assert call.operation == ModelReady(MIDDLE, 0, awaits=True)
        return number, call

    given_up, unanswered = asks()
    loop.front.cancel(given_up)
    assert [(answer.request_id, answer.message) for answer in loop.answers(1)] == [
        (given_up, "the request was cancelled")
    ]
    number, call = asks()
    loop.load(tmp_path / MIDDLE)
    for each in (unanswered, call):
        loop.tell(Reply(each.call_id, result=b"true"))
    assert [(answer.request_id, answer.message) for answer in loop.answers(1)] == [(number, "")]


def test_a_call_of_a_model_that_does_not_come(loop: WorkerLoop, tmp_path: Path) -> None:
    write_model(tmp_path, FIRST, CALLS.replace("MODEL", MIDDLE))
    loop.load(tmp_path / FIRST)
    (tmp_path / FIRST / "open").touch()
    given_up = "model 'middle' cannot be served now: 2 worker processes died while loading it"
    for reply, code, end in (
        (Reply(0, result=b"true"), "NOT_FOUND", "calls stay in the worker of their caller, 'first'"),
        (Reply(0, result=b"false"), "NOT_FOUND", "'middle' is not ready."),
        (Reply(0, "UNAVAILABLE", given_up), "UNAVAILABLE", given_up),
    ):
        loop.submit(FIRST, [_tensor(3.0)])
        assert loop.front.flush()
        loop.tell(msgspec.structs.replace(reply, call_id=loop.hear(ControlCall).call_id))
        (answer,) = loop.answers(1)
        assert (answer.code, end in answer.message) == (code, True)


_LATE = """
    from pathlib import Path
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            (request,) = requests
            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            inputs = [pb_utils.get_input_tensor_by_name(request, "x")]
            asked = pb_utils.InferenceRequest(model_name="middle", requested_output_names=["y"], inputs=inputs)
            Path("CAME").write_text(str(asked.exec().has_error()))
"""


def test_a_call_that_has_one_answer_is_served_behind_the_last_response(loop: WorkerLoop, tmp_path: Path) -> None:
    import_system.prepare()
    write_model(tmp_path, MIDDLE, applying('return {"y": inputs["x"]}', "x FP32[1]", "y FP32[1]"))
    decoupled = fields("x FP32 1", "y FP32 1", "model_transaction_policy { decoupled: true }")
    write_model(tmp_path, FIRST, _LATE.replace("CAME", str(tmp_path / "came")), decoupled)
    for name in (MIDDLE, FIRST):
        loop.load(tmp_path / name)
    loop.submit(FIRST, [_tensor(3.0)])
    loop.answers(1)
    while any(version.busy for version in loop.worker._models):
        loop.worker.iterate()
    assert (tmp_path / "came").read_text() == "False"


class LeftCall:
    """Counts how often it was asked for its requests."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self.caller = Caller(ModelPort("m", 1, None))
        self.looks = 0
        self.code = ""

    @property
    def requests(self) -> Sequence[Request]:
        self.looks += 1
        return self._requests

    def answered(self, error: ServingError, final: bool) -> None:
        self.code = error.code


def test_a_call_of_many_requests_ends_with_the_last_and_is_looked_at_once(loop: WorkerLoop) -> None:
    submitter: SubmitterLink[Request] = SubmitterLink(1, cast(Any, None))
    *batch, last = [request_of({}, submitter=submitter, request_id=number) for number in range(100)]
    calls, call = loop.worker._dispatcher.calls, LeftCall([last, *batch])
    submitter.in_flight[last.request_id] = last
    calls._waiting[cast(Any, call)] = None
    calls._note(cast(Any, call))
    call.looks = 0
    calls.ended(batch)
    assert (call.looks, call.code) == (1, "")
    submitter.in_flight.clear()
    calls.ended([last])
    assert (call.code, call.caller.in_flight, calls.of, calls._waiting) == (Cancelled.code, 0, {}, {})


def test_a_run_that_fails_is_over() -> None:
    """A call that a thread of a failed run begins later is made for no request, as behind a run that returns."""
    caller = Caller(ModelPort("m", 1, None), [request_of({})])
    with contextlib.suppress(ValueError), calling(caller):
        raise ValueError
    assert caller.requests == ()
