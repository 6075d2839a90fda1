"""Models whose devices are broken: which are given up, what that does to readiness, and that they come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensord.daemon.models import readiness
from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.repository import FoundModel
from tensord.shm.control_records import Loaded
from tests.daemon.models.test_lifecycle import sent, states
from tests.invariants import check_invariants

BOTH = ("cuda:0", "cuda:1")


@pytest.fixture
def lifecycle() -> Lifecycle:
    """Returns three models after worker 1 on cuda:1 has gone.

    That worker served "second" alone, and "both" and "any" together with worker 0.
    """
    made = Lifecycle()
    for worker in (0, 1):
        made.worker_joined(worker, f"cuda:{worker}")
    for token, (name, devices) in enumerate({"any": (), "both": BOTH, "second": ("cuda:1",)}.items()):
        made.load(FoundModel(name, Path("/models", name), b"", (1,), (1,), "f", devices=devices), token)
        for worker in (0, 1):
            made.loaded(worker, Loaded(name, 1))
    made.worker_left(1)
    return made


def judged(lifecycle: Lifecycle, strict: bool) -> bool:
    wanted = {"any", "both", "second"}
    return readiness.readiness(readiness.standings(wanted, (), {}, lifecycle), strict, wanted).ready


def test_what_no_worker_will_serve_is_given_up_until_one_comes(lifecycle: Lifecycle) -> None:
    assert lifecycle.stranded(BOTH) == []
    # Its replacement may come any moment.
    assert not judged(lifecycle, strict=True)
    out = lifecycle.stranded(("cuda:0",))
    assert [(one.state.name, one.state.state, one.state.reason) for one in out] == [  # type: ignore[union-attr]
        ("second", "UNAVAILABLE", "no worker can use cuda:1 at present")
    ]
    assert lifecycle.stranded(("cuda:0",)) == []
    check_invariants(lifecycle)
    # That is the model's trouble; the others' host is ready.
    assert judged(lifecycle, strict=True)
    assert sorted(sent(lifecycle.worker_joined(2, "cuda:1"))) == [(2, "Load", 1)] * 3
    assert states(lifecycle.loaded(2, Loaded("second", 1))) == [(1, "READY", (2,))]
    check_invariants(lifecycle)
    assert judged(lifecycle, strict=True)


def test_the_try_of_a_worker_that_dies_is_made_by_the_next_one(lifecycle: Lifecycle) -> None:
    """Also where the version is not blamed for the death: nobody else would load it again."""
    lifecycle.stranded(("cuda:0",))
    lifecycle.worker_joined(2, "cuda:1")
    lifecycle.worker_left(2, dismissed=True)
    assert len(sent(lifecycle.worker_joined(3, "cuda:1"))) == 3
    assert states(lifecycle.loaded(3, Loaded("second", 1))) == [(1, "READY", (3,))]
    check_invariants(lifecycle)


def test_a_host_that_serves_nothing_is_not_ready(lifecycle: Lifecycle) -> None:
    lifecycle.worker_left(0)
    assert len(lifecycle.stranded(())) == 3
    assert not judged(lifecycle, strict=True)


def test_one_that_failed_by_itself_holds_readiness_up(lifecycle: Lifecycle) -> None:
    lifecycle.stranded(("cuda:0",))
    lifecycle.worker_joined(2, "cuda:1")
    lifecycle.loaded(2, Loaded("second", 1, reason="OSError: no"))
    assert not judged(lifecycle, strict=True)
    assert judged(lifecycle, strict=False)
