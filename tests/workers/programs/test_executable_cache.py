"""Tests what a second start finds in the cache: executables of ours, for this platform. test_cache_directory tests the folder."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable

from tensord.workers.compiling.compilers import Compilers
from tensord.workers.jax_internals import interfaces
from tensord.workers.processor import outside_compiler
from tensord.workers.processor.outside_compiler import OutsideCompiler
from tensord.workers.programs import cache_directory as cache_directory_module
from tensord.workers.programs import executable_cache as executable_cache_module
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.executable_cache import ExecutableCache, cache_directory
from tensord.workers.programs.jax_cache import JaxCache
from tensord.workers.programs.placement import CompiledProgram, Placement
from tests.workers.parameters.made_sets import loaded
from tests.workers.processor.test_outside_compiler import answers, model

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


@pytest.fixture(params=["nothing", "another one"])
def other_jax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "nothing":
        monkeypatch.delattr(serialize_executable, "_JaxPjrtPickler")
    else:
        monkeypatch.setattr(serialize_executable, "_JaxPjrtPickler", object)
    executable_cache_module._pickler.cache_clear()
    # Uncached, because what another test has found stays.
    monkeypatch.setattr(outside_compiler, "_hook", outside_compiler._hook.__wrapped__)
    yield
    executable_cache_module._pickler.cache_clear()


def test_programs_are_compiled_in_the_worker(other_jax: None, caplog: pytest.LogCaptureFixture) -> None:
    compilers = Compilers(1)
    made = model(cache=ExecutableCache(None, None, OutsideCompiler(compilers)))
    assert answers(made) == answers(model())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    (said,) = interfaces.missing()
    assert said.startswith(
        "programs are compiled in the worker (jax.experimental.serialize_executable._JaxPjrtPickler: "
    )
