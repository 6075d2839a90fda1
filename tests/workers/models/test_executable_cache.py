"""What a second start finds: whole entries that are ours; anything else is removed, or not even looked at."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import jax
import numpy as np
import pytest

from workers.models.executable_cache import ExecutableCache, cache_directory
from workers.models.placement import CompiledProgram, Placement

USUAL = Placement(None)
KEY = ExecutableCache.key(("a", b"b"))


def compiled() -> CompiledProgram:
    made = jax.jit(lambda x: {"y": x + 1}).lower(jax.ShapeDtypeStruct((3,), np.float32)).compile()
    return CompiledProgram(made, USUAL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = cache_directory(str(tmp_path / "deep" / "cache"))
    assert found is not None
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    return found


def entry(folder: Path) -> Path:
    return folder / f"{KEY}.executable"


def test_round_trip(folder: Path) -> None:
    cache = ExecutableCache(folder)
    assert cache.load(KEY, USUAL) is None
    cache.store(KEY, compiled())
    found = cache.load(KEY, USUAL)
    assert found is not None
    assert np.asarray(found.call(np.ones(3, np.float32))["y"]).tolist() == [2, 2, 2]
    assert (cache.hits, cache.misses) == (1, 1)
    assert [path.name for path in folder.iterdir()] == [entry(folder).name]
    assert stat.S_IMODE(entry(folder).stat().st_mode) == 0o600


@pytest.mark.parametrize("keep", [0, 10, 40, 1000, -1])
def test_a_damaged_entry_is_removed_and_said(folder: Path, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = ExecutableCache(folder)
    cache.store(KEY, compiled())
    content = bytearray(entry(folder).read_bytes()[:keep])
    entry(folder).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert cache.load(KEY, USUAL) is None
    if keep:
        assert "removing cached executable" in caplog.text
        assert not entry(folder).exists()
    cache.store(KEY, compiled())
    assert cache.load(KEY, USUAL) is not None


def test_a_changed_byte_is_never_unpickled(folder: Path) -> None:
    cache = ExecutableCache(folder)
    cache.store(KEY, compiled())
    content = bytearray(entry(folder).read_bytes())
    content[200] ^= 1
    entry(folder).write_bytes(content)
    assert cache.load(KEY, USUAL) is None


def test_a_directory_that_others_can_write_to_is_not_used(folder: Path) -> None:
    cache = ExecutableCache(folder)
    cache.store(KEY, compiled())
    os.chmod(folder, 0o770)
    assert cache.load(KEY, USUAL) is None
    os.chmod(folder, 0o700)
    assert cache.load(KEY, USUAL) is not None


def test_no_directory_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cache_directory(str(tmp_path / "file" / "cache")) is None
    cache = ExecutableCache(None)
    cache.store(KEY, compiled())
    assert cache.load(KEY, USUAL) is None


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    assert cache_directory("") == tmp_path / "tensord"
    monkeypatch.setenv("CACHE_DIRECTORY", f"{tmp_path / 'systemd'}:/second")
    assert cache_directory("") == tmp_path / "systemd"


def test_the_key_depends_on_every_part() -> None:
    keys = {
        ExecutableCache.key(parts)
        for parts in ((), ("a",), ("b",), ("a", "b"), ("ab",), ("ab", ""), ("", "ab"), (b"a", b"b", b""))
    }
    assert len(keys) == 8
    assert ExecutableCache.key(("a", b"b")) == KEY
