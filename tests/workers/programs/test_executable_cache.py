"""Tests what a second start finds in the cache: executables of ours, for this platform. test_cache_directory tests the folder."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.workers.processor.single_thread import SingleThreadDevice
from tensord.workers.programs import cache_directory as cache_directory_module
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.executable_cache import ExecutableCache, JaxCache, cache_directory
from tensord.workers.programs.placement import CompiledProgram, Placement
from tests.workers.parameters.made_sets import loaded
from tests.workers.programs.test_executables import model_of, run

USUAL = Placement(loaded(None))
KEY = ExecutableCache.key(("a", b"b"))


def compiled() -> CompiledProgram:
    made = jax.jit(lambda x: {"y": x + 1}).lower(jax.ShapeDtypeStruct((3,), np.float32)).compile()
    return CompiledProgram(made, USUAL)


@pytest.fixture
def directory(tmp_path: Path) -> CacheDirectory:
    found = cache_directory(str(tmp_path / "cache"))
    assert found is not None
    return found


def entry(directory: CacheDirectory) -> Path:
    return directory.path / f"{KEY}.executable"


def test_round_trip(directory: CacheDirectory) -> None:
    cache = ExecutableCache(directory)
    assert cache.load(KEY, USUAL) is None
    cache.store(KEY, compiled())
    found = cache.load(KEY, USUAL)
    assert found is not None
    assert np.asarray(found.call(np.ones(3, np.float32))["y"]).tolist() == [2, 2, 2]
    assert cache.compiles.figures().cache_hits == 1
    assert {path.name for path in directory.path.iterdir()} == {entry(directory).name, "secret"}


@pytest.mark.parametrize("keep", [0, 10, 40, 1000, -1])
def test_a_damaged_entry_is_removed_and_said(
    directory: CacheDirectory, keep: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ExecutableCache(directory)
    cache.store(KEY, compiled())
    entry(directory).write_bytes(entry(directory).read_bytes()[:keep])
    with caplog.at_level(logging.WARNING):
        assert cache.load(KEY, USUAL) is None
    assert "removing cached executable" in caplog.text
    assert not entry(directory).exists()
    cache.store(KEY, compiled())
    assert cache.load(KEY, USUAL) is not None


def test_a_stale_entry_is_removed_and_said(directory: CacheDirectory, caplog: pytest.LogCaptureFixture) -> None:
    """It is ours and whole, and what it names is no longer there."""
    directory.write(entry(directory).name, b"cno_such_module\nname\n.")
    with caplog.at_level(logging.WARNING):
        assert ExecutableCache(directory).load(KEY, USUAL) is None
    assert "ModuleNotFoundError: No module named 'no_such_module'" in caplog.text
    assert not entry(directory).exists()


def test_no_directory_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cache_directory(str(tmp_path / "file" / "cache")) is None
    cache = ExecutableCache(None)
    cache.store(KEY, compiled())
    assert cache.load(KEY, USUAL) is None


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    found = cache_directory("")
    assert found is not None
    assert found.path == tmp_path / "tensord"
    monkeypatch.setenv("CACHE_DIRECTORY", f"{tmp_path / 'systemd'}:/second")
    found = cache_directory("")
    assert found is not None
    assert found.path == tmp_path / "systemd"


def test_the_key_depends_on_every_part() -> None:
    keys = {
        ExecutableCache.key(parts)
        for parts in ((), ("a",), ("b",), ("a", "b"), ("ab",), ("ab", ""), ("", "ab"), (b"a", b"b", b""))
    }
    assert len(keys) == 8
    assert ExecutableCache.key(("a", b"b")) == KEY


def test_a_full_disk_is_named_once(
    directory: CacheDirectory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message covers both our executables and JAX's own cache."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache, programs = ExecutableCache(directory), JaxCache(directory)
    made = compiled()
    monkeypatch.setattr(cache_directory_module, "_written", full)
    with caplog.at_level(logging.INFO):
        for number in range(5):
            assert cache.store(f"{number}", made) is made
            programs.put(f"{number}", b"content")
    said = f"executables are not cached: directory {directory.path}: {os.strerror(errno.ENOSPC)}"
    assert [record.message for record in caplog.records] == [said]


WEIGHTS = np.random.default_rng(0).random((8, 8), np.float32)


def layers(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"y": jnp.tanh(inputs["x"] @ parameters["w"]) + jnp.linalg.inv(parameters["w"])[0]}


def model(**more: Any) -> Any:
    return model_of(layers, {"x": "FP32[8]"}, {"y": "FP32[8]"}, 4, (1, 2, 4), parameters={"w": WEIGHTS}, **more)


def answers(of: Any) -> list[Any]:
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    return [run(of, {"x": x[:rows]}, rows=(rows,))[0]["y"].tolist() for rows in (1, 2, 4)]


@pytest.mark.parametrize("small", [False, True])
def test_what_is_kept_answers_the_same_in_the_next_start(directory: CacheDirectory, small: bool) -> None:
    """Bit for bit, LAPACK and all, and nothing is compiled."""
    device = {"single_thread": SingleThreadDevice(1 << 20)} if small else {}
    first, second = ExecutableCache(directory), ExecutableCache(directory)
    expected = answers(model(**device))
    assert answers(model(cache=first, **device)) == expected
    assert (first.compiles.figures().cache_hits, first.compiles.figures().count) == (0, 3)
    assert answers(model(cache=second, **device)) == expected
    assert (second.compiles.figures().cache_hits, second.compiles.figures().count) == (3, 0)
