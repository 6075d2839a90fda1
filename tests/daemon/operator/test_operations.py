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
    async def done(*_: Any) -> None:
        pass

    rest: Any = SimpleNamespace(settled=done)
    models: Any = SimpleNamespace(lifecycle=lifecycle, sent=done)
    operations = Operations(models, rest, rest, rest, rest, rest, rest, Audit())
    assert await operations.reply_to_model(ControlCall(5, asked), 3) == reply
