"""Programs that a compile process made: the same as those made here, kept and found like them, and here where it must be."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tensord.shm.errors import Internal
from tensord.workers.compiling.compilers import Compilers
from tensord.workers.processor.outside_compiler import OutsideCompiler, outside_compiler
from tensord.workers.processor.single_thread import SingleThreadDevice
from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.executable import Wanted
from tensord.workers.programs.executable_cache import ExecutableCache
from tests.daemon_process import nothing_left_behind, wait_until
from tests.workers.compiling.test_compilers import processes
from tests.workers.programs.test_executables import model_of, run

WEIGHTS = np.random.default_rng(0).random((8, 8), np.float32)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with nothing_left_behind():
        yield


class CountedCompiler(OutsideCompiler):
    """Counts the programs that compile processes made."""

    made = 0

    def _compile(self, *arguments: Any) -> Any:
        found = super()._compile(*arguments)
        self.made += found is not None
        return found


def outside() -> CountedCompiler:
    return CountedCompiler(Compilers(2))


def layers(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    made = jnp.tanh(inputs["x"] @ parameters["w"])
    return {"y": made + jnp.linalg.inv(parameters["w"])[0]}


def model(apply: Any = layers, cache: ExecutableCache | None = None, **more: Any) -> Any:
    given = {"parameters": {"w": WEIGHTS}, "cache": cache} | more
    return model_of(apply, {"x": "FP32[8]"}, {"y": "FP32[8]"}, 4, (1, 2, 4), **given)


def answers(of: Any) -> list[Any]:
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    return [run(of, {"x": x[:rows]}, rows=(rows,))[0]["y"].tolist() for rows in (1, 2, 4)]


@pytest.mark.parametrize("small", [False, True])
def test_the_same_program_kept_and_found(tmp_path: Path, small: bool) -> None:
    """Bit for bit, LAPACK and all; and what is kept of it runs in the next start, which compiles nothing."""
    device = {"single_thread": SingleThreadDevice(1 << 20)} if small else {}
    made = outside()
    first = ExecutableCache(CacheDirectory(tmp_path / "cache"), None, made)
    expected = answers(model(**device))
    assert answers(model(cache=first, **device)) == expected
    assert (first.compiles.figures().cache_hits, first.compiles.figures().count, made.made) == (0, 3, 3)
    second = ExecutableCache(CacheDirectory(tmp_path / "cache"))
    assert answers(model(cache=second, **device)) == expected
    assert (second.compiles.figures().cache_hits, second.compiles.figures().count) == (3, 0)


def test_without_a_directory() -> None:
    made = outside()
    assert answers(model(cache=ExecutableCache(None, None, made))) == answers(model())
    assert made.made == 3


def test_what_calls_back_is_compiled_here(tmp_path: Path) -> None:
    """Its program has an address in this process."""

    def calls(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        x = inputs["x"]
        return {"y": jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)}

    made = outside()
    found = model(calls, ExecutableCache(CacheDirectory(tmp_path / "cache"), None, made))
    assert answers(found)[0][0][:2] == pytest.approx([-2, -2 + 4 / 31])
    assert made.made == 0


def test_what_nobody_planned_is_compiled_here() -> None:
    made = outside()
    found = model(cache=ExecutableCache(None, None, made))
    found.executables.compile(Wanted(3, ((8,),)))
    assert made.made == 3


def test_a_refusal_is_told_in_the_words_of_jax(caplog: pytest.LogCaptureFixture) -> None:
    """The process that has the model's own code may know what the other one does not."""

    def apply(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        x = inputs["x"]
        return {"y": jax.ffi.ffi_call("nobody_has_this", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)}

    with caplog.at_level(logging.INFO), pytest.raises(jax.errors.JaxRuntimeError, match="nobody_has_this"):
        model(apply, ExecutableCache(None, None, outside()))
    assert "a compile process refused a program, which is compiled in the worker" in caplog.text


def test_a_compiler_that_dies(tmp_path: Path) -> None:
    """The error names the program; nothing of it is kept, and the next load works as ever."""

    def slow(parameters: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        x = inputs["x"]
        for step in range(100):
            x = jnp.sort(jnp.tanh(x * step))
        return {"y": x}

    def kill() -> None:
        wait_until(processes, "a compile process")
        os.kill(processes()[0].pid, signal.SIGKILL)

    cache = ExecutableCache(CacheDirectory(tmp_path / "cache"), None, OutsideCompiler(Compilers(1)))
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(
        Internal, match=r"model 'm', program for 1 rows of \[8\]: the process that compiled it was killed"
    ):
        model(slow, cache)
    killer.join()
    assert answers(model(cache=cache)) == answers(model())


def test_how_many() -> None:
    assert outside_compiler(0) is None
    found, usual = outside_compiler(3), outside_compiler("auto")
    assert found is not None
    assert usual is not None
    assert found.count == 3
    assert 1 <= usual.count <= 4
