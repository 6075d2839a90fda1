"""Tests which isolated workers are needed, and whether there may be one more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensord.config.model_config import parse_pbtxt
from tensord.config.options import Workers
from tensord.daemon.models import repository
from tensord.daemon.models.lifecycle import Lifecycle
from tensord.daemon.models.repository import FoundModel
from tensord.shm.control_records import Loaded
from tensord.shm.errors import InvalidArgument
from tests.daemon.models.test_lifecycle import sent, settled, states
from tests.invariants import check_invariants

OPTIONS = Workers(gpu_memory_fraction=0.7, isolated_memory_fraction=0.1, max_isolated=3)


def found(name: str, *devices: str, part: str = "", fingerprint: str = "f") -> FoundModel:
    text = f'parameters {{ key: "isolated_memory_fraction" value {{ string_value: "{part}" }} }}' if part else ""
    config = parse_pbtxt(text, name).SerializeToString()
    return FoundModel(name, Path("/models", name), config, (1,), (1,), fingerprint, devices=devices)


def test_a_worker_is_needed_from_the_load_until_the_unload() -> None:
    lifecycle = Lifecycle()
    lifecycle.worker_joined(0, "cpu:0")
    assert lifecycle.isolated(OPTIONS) == {}
    lifecycle.load(found("m", "cpu:0#m", part="0.25"), 1)
    assert lifecycle.isolated(OPTIONS) == {"cpu:0#m": 0.25}
    assert sent(lifecycle.worker_joined(1, "cpu:0#m")) == [(1, "Load", 1)]
    assert settled(lifecycle.loaded(1, Loaded("m", 1))) == [(1, "")]
    # It dies: the next one is needed.
    lifecycle.worker_left(1)
    assert lifecycle.isolated(OPTIONS) == {"cpu:0#m": 0.25}
    lifecycle.worker_joined(2, "cpu:0#m")
    lifecycle.loaded(2, Loaded("m", 1))
    assert sent(lifecycle.unload("m", 2)) == [(2, "Unload", 1)]
    assert lifecycle.isolated(OPTIONS) == {"cpu:0#m": 0.25}
    assert settled(lifecycle.unloaded(2, "m", 1)) == [(2, "")]
    assert lifecycle.isolated(OPTIONS) == {}
    assert lifecycle.worker_left(2, dismissed=True) == []
    check_invariants(lifecycle)


def test_one_that_fails_needs_none() -> None:
    lifecycle = Lifecycle()
    lifecycle.load(found("m", "cpu:0#m"), 1)
    lifecycle.worker_joined(1, "cpu:0#m")
    lifecycle.loaded(1, Loaded("m", 1, reason="OSError: no"))
    assert lifecycle.isolated(OPTIONS) == {}


def test_one_that_moves_needs_its_former_worker_until_the_other_serves() -> None:
    lifecycle = Lifecycle()
    lifecycle.worker_joined(0, "cpu:0")
    lifecycle.load(found("m", "cpu:0#m"), 1)
    lifecycle.worker_joined(1, "cpu:0#m")
    lifecycle.loaded(1, Loaded("m", 1))
    assert sent(lifecycle.load(found("m", "cpu:0", fingerprint="g"), 2)) == [(0, "Load", 1)]
    assert lifecycle.isolated(OPTIONS) == {"cpu:0#m": 0.1}
    out = lifecycle.loaded(0, Loaded("m", 1))
    assert (states(out), sent(out), settled(out)) == ([(1, "READY", (0,))], [(1, "Unload", 1)], [(2, "")])
    assert lifecycle.isolated(OPTIONS) == {"cpu:0#m": 0.1}
    assert lifecycle.unloaded(1, "m", 1) == []
    assert lifecycle.isolated(OPTIONS) == {}
    # Nobody is to blame for what it was still loading.
    lifecycle.worker_joined(2, "cpu:0#m")
    lifecycle.load(found("m", "cpu:0#m", fingerprint="h"), 3)
    lifecycle.load(found("m", "cpu:0", fingerprint="i"), 4)
    lifecycle.worker_left(2, dismissed=True)
    assert lifecycle.models["m"].versions[1].deaths == 0
    check_invariants(lifecycle)


def test_a_load_ends_where_its_worker_cannot_come() -> None:
    """A load that waits for the worker ends, and one that would move there; both are made up for when it starts after all."""
    lifecycle = Lifecycle()
    lifecycle.worker_joined(0, "cpu:0")
    lifecycle.load(found("moves", "cpu:0"), 1)
    lifecycle.loaded(0, Loaded("moves", 1))
    for token, name in enumerate(("new", "moves"), 2):
        lifecycle.load(found(name, f"cpu:0#{name}", fingerprint="g"), token)
    assert lifecycle.stranded(("cpu:0", "cpu:0#new", "cpu:0#moves")) == []
    out = lifecycle.stranded(("cpu:0",))
    reasons = [f"no worker can use cpu:0#{name} at present" for name in ("moves", "new")]
    assert [(token, reason in error) for (token, error), reason in zip(settled(out), reasons, strict=True)] == [
        (3, True),
        (2, True),
    ]
    assert states(out) == [(1, "UNAVAILABLE", ())]
    assert lifecycle.stranded(("cpu:0",)) == []
    assert set(lifecycle.isolated(OPTIONS)) == {"cpu:0#new", "cpu:0#moves"}
    check_invariants(lifecycle)
    for worker, name in enumerate(("new", "moves"), 5):
        assert sent(lifecycle.worker_joined(worker, f"cpu:0#{name}")) == [(worker, "Load", 1)]
        assert states(lifecycle.loaded(worker, Loaded(name, 1))) == [(1, "READY", (worker,))]
    check_invariants(lifecycle)


def refusal(model: FoundModel, taken: dict[str, float]) -> str:
    with pytest.raises(InvalidArgument) as caught:
        repository.check_isolated(model, taken, OPTIONS)
    return caught.value.message


def test_bounds() -> None:
    taken = {"cpu:0#a": 0.1, "cuda:0#b": 0.1, "cuda:1#b": 0.1, "cuda:0#c": 0.1}
    repository.check_isolated(found("shared", "cpu:0"), taken, OPTIONS)
    # It has one already.
    repository.check_isolated(found("a", "cuda:1#a", part="0.2"), taken, OPTIONS)
    assert refusal(found("d", "cpu:0#d"), taken) == (
        "model 'd' is to have a worker to itself (isolated), and 3 models have one; at most 3 may (workers.max_isolated)"
    )
    assert refusal(found("a", "cuda:0#a", "cuda:1#a", part="0.15"), taken) == (
        "model 'a' is to have 0.15 of the memory of cuda:0 to itself (isolated_memory_fraction), and 0.9 of it are taken: 0.7 by "
        "the workers that models share (workers.gpu_memory_fraction), 0.2 by other isolated models; that would be 1.05"
    )
    repository.check_isolated(found("a", "cuda:0#a", part="0.1"), taken, OPTIONS)
    assert "3 models" not in refusal(found("a", "cuda:0#a", part="0.1001"), taken)
