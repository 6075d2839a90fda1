"""Settings of JAX that a model's code makes hold where code of that model runs, and nowhere else."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

from tensord.workers.imports import own_flags
from tensord.workers.imports.own_flags import OwnFlags, WholeProcess


@pytest.fixture(autouse=True)
def patched() -> None:
    own_flags.prepare()


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
    flags, context = OwnFlags("m"), own_flags._context

    def other() -> None:
        with flags.code():
            jax.config.update("jax_debug_infs", True)

    def slow(name: str) -> Any:
        monkeypatch.setattr(own_flags, "_context", context)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return context(name)

    with flags.code():
        jax.config.update("jax_debug_nans", True)
    monkeypatch.setattr(own_flags, "_context", slow)
    with flags.code():
        assert jax.config.jax_debug_nans
    with flags.code():
        assert jax.config.jax_debug_infs
