"""The daemon's replies to models that ask it for other models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.repository import FoundModel
from tensord.daemon.operator.audit import Audit
from tensord.daemon.operator.operations import Operations
from tensord.shm.control_records import ControlCall, Loaded, Reply
from tensord.shm.operations import ModelReady

GIVEN_UP = "2 worker processes died while loading it, the last one died"


@pytest.fixture
def lifecycle() -> Lifecycle:
    """Has model ``m``, which two workers have died of and a third one has yet to try, and ``n``, which serves."""
    made = Lifecycle()
    for number, name in enumerate("mn"):
        made.load(FoundModel(name, Path(name), chosen=(1,), fingerprint="f"), number)
    for worker in (1, 2):
        made.worker_joined(worker, "cpu:0")
        made.loaded(worker, Loaded("n", 1))
        made.worker_left(worker)
    made.worker_joined(3, "cpu:0")
    made.loaded(3, Loaded("n", 1))
    return made


@pytest.mark.parametrize(
    ("asked", "reply"),
    [
        (ModelReady("m", awaits=True), Reply(5, "UNAVAILABLE", f"model 'm' cannot be served now: {GIVEN_UP}")),
        (
            ModelReady("m", 1, awaits=True),
            Reply(5, "UNAVAILABLE", f"model 'm' version 1 cannot be served now: {GIVEN_UP}"),
        ),
        (
            ModelReady("m.pull_back", awaits=True),
            Reply(5, "UNAVAILABLE", f"model 'm' cannot be served now: {GIVEN_UP}"),
        ),
        (ModelReady("m", 2, awaits=True), Reply(5, result=b"false")),
        (ModelReady("n", awaits=True), Reply(5, result=b"true")),
        # ``models.is_ready`` wants no reason.
        (ModelReady("m"), Reply(5, result=b"false")),
    ],
)
async def test_a_call_of_a_model_that_is_given_up_gets_the_reason(
    lifecycle: Lifecycle, asked: ModelReady, reply: Reply
) -> None:
    assert await answered(lifecycle, asked, 3) == reply


@pytest.mark.parametrize(
    ("devices", "reply"),
    [
        ((), Reply(5, "UNAVAILABLE", f"model 'm' cannot be served now: {GIVEN_UP}")),
        # A worker of another device is never to load it.
        (("cpu:1",), Reply(5, result=b"true")),
    ],
)
async def test_a_call_of_a_model_that_others_serve_gets_why_its_worker_lacks_it(
    devices: tuple[str, ...], reply: Reply
) -> None:
    made = Lifecycle()
    made.load(FoundModel("m", Path("m"), chosen=(1,), fingerprint="f", devices=devices), 0)
    made.worker_joined(1, "cpu:1")
    made.loaded(1, Loaded("m", 1))
    for worker in (2, 3):
        made.worker_joined(worker, "cpu:1")
        made.worker_left(worker)
    made.worker_joined(4, "cpu:0")
    assert made.is_ready("m")
    assert made.reason("m", 1) == GIVEN_UP
    assert await answered(made, ModelReady("m", awaits=True), 4) == reply


async def answered(lifecycle: Lifecycle, asked: ModelReady, worker: int) -> Reply:
    """Returns what a worker is answered, of which a model's code asks."""

    async def done(*_: Any) -> None:
        pass

    rest: Any = SimpleNamespace(settled=done)
    models: Any = SimpleNamespace(lifecycle=lifecycle, sent=done)
    operations = Operations(models, rest, rest, rest, rest, rest, rest, Audit())
    return await operations.reply_to_model(ControlCall(5, asked), worker)
