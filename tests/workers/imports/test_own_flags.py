"""Settings of JAX that a model's code makes hold where code of that model runs, and nowhere else."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import jax
import pytest

from tensord.workers.imports import own_flags
from tensord.workers.imports.own_flags import OwnFlags, WholeProcess


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker that several models share."""
    monkeypatch.setattr(jax.config, "update", inspect.unwrap(jax.config.update))
    own_flags.prepare(shared=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_default_matmul_precision", "highest"),
        ("jax_disable_jit", True),
        ("jax_transfer_guard", "log"),
        ("jax_transfer_guard_host_to_device", "log"),
        ("jax_transfer_guard_device_to_host", "log"),
        ("jax_transfer_guard_device_to_device", "log"),
        ("jax_check_tracer_leaks", True),
        ("jax_enable_checks", True),
        ("jax_thread_guard", True),
    ],
)
def test_a_setting_holds_in_each_run_of_the_models_code(name: str, value: Any) -> None:
    """Each that JAX has a context manager for."""
    flags, former, updates = OwnFlags("m"), jax.config.values[name], WholeProcess.updates
    with flags.code():
        jax.config.update(name, value)
        assert getattr(jax.config, name) == value
    assert getattr(jax.config, name) == former
    with flags.code():
        assert getattr(jax.config, name) == value
    assert (getattr(jax.config, name), WholeProcess.updates) == (former, updates)


def test_a_setting_that_another_instance_makes_as_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    flags, context = OwnFlags("m"), own_flags.context_of

    def other() -> None:
        with flags.code():
            jax.config.update("jax_debug_infs", True)

    def slow(name: str) -> Any:
        monkeypatch.setattr(own_flags, "context_of", context)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return context(name)

    with flags.code():
        jax.config.update("jax_debug_nans", True)
    monkeypatch.setattr(own_flags, "context_of", slow)
    with flags.code():
        assert jax.config.jax_debug_nans
    with flags.code():
        assert jax.config.jax_debug_infs


def test_a_setting_that_a_function_makes_when_it_is_traced() -> None:
    """Holds for that function from there on; before, the model had made none."""
    flags, found = OwnFlags("m"), list[bool]()

    def apply() -> None:
        found.append(jax.config.jax_debug_nans)
        jax.config.update("jax_debug_nans", True)

    applied = flags.applied(apply)
    for _ in range(2):
        applied()
        assert not jax.config.jax_debug_nans
    assert found == [False, True]


def test_outside_of_models_code_it_is_refused() -> None:
    """In whatever thread; unless it changes nothing, or JAX has no context manager for it."""
    flags, refused, updates = OwnFlags("m"), list[str](), WholeProcess.updates

    def change() -> None:
        jax.config.update("jax_enable_x64", False)
        with pytest.raises(RuntimeError) as caught:
            jax.config.update("jax_enable_x64", True)
        refused.append(str(caught.value))

    change()
    with flags.code():
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()
    assert len(refused) == 2
    assert "use 'with jax.enable_x64(True):' there" in refused[1]
    assert WholeProcess.updates == updates
    jax.config.update("jax_random_seed_offset", jax.config.values["jax_random_seed_offset"])
    assert WholeProcess.updates == updates + 1


def test_where_others_share_the_process_it_holds_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in JAX itself: in a notebook that tries a model, and in a worker of one model."""
    monkeypatch.setattr(jax.config, "update", inspect.unwrap(jax.config.update))
    own_flags.prepare(shared=True)
    jax.config.update("jax_debug_nans", True)
    try:
        assert jax.config.values["jax_debug_nans"]
    finally:
        jax.config.update("jax_debug_nans", False)
