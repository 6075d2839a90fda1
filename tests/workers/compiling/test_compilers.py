"""Compile processes: they compile, refuse, die without harm, and end by themselves when there is nothing to do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from tensord.shm.errors import Cancelled
from tensord.shm.record import encoder
from tensord.workers.compiling.compilers import CompilerDied, Compilers
from tensord.workers.compiling.records import Compile, Compiled, CompileRefused
from tensord.workers.threads.cancellation import Cancellation
from tests.daemon_process import nothing_left_behind, wait_until

DEVICE = jax.devices()[0]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with nothing_left_behind():
        yield


def options() -> bytes:
    """Returns the options that JAX gives the compiler."""
    from jax._src.compiler import get_compile_options

    return get_compile_options(num_replicas=1, num_partitions=1, device_assignment=np.array([[0]])).SerializeAsString()


def module(steps: int = 1) -> bytes:
    """Returns a module with so many steps that compiling it takes as long as a test likes."""

    def function(x: jax.Array) -> jax.Array:
        for step in range(steps):
            x = jnp.sort(jnp.tanh(x * step))
        return x + 1

    text = io.BytesIO()
    lowered = jax.jit(function).lower(jax.ShapeDtypeStruct((4,), np.float32))
    lowered.compiler_ir("stablehlo").operation.write_bytecode(text)
    return text.getvalue()


def asked(steps: int = 1) -> Compile:
    return Compile(module(steps), options(), 1, 1, (0,))


def processes() -> list[psutil.Process]:
    """Returns the compile processes of this process."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tensord.workers.compiling" in child.cmdline():
                found.append(child)
    return found


def test_what_it_makes_runs_here() -> None:
    answer = Compilers(1).compile(asked(steps=0), Cancellation())
    assert isinstance(answer, Compiled)
    found = DEVICE.client.deserialize_executable(
        answer.executable, executable_devices=DEVICE.client.local_devices()[:1]
    )
    (made,) = found.execute_sharded(
        [jax.device_put(np.arange(4, dtype=np.float32))]
    ).disassemble_into_single_device_arrays()
    assert np.asarray(made[0]).tolist() == [1, 2, 3, 4]


def test_what_xla_does_not_take_is_refused() -> None:
    compilers = Compilers(1)
    answer = compilers.compile(Compile(b"nothing", options(), 1, 1, (0,)), Cancellation())
    assert isinstance(answer, CompileRefused)
    assert answer.reason
    (process,) = processes()
    assert isinstance(compilers.compile(asked(), Cancellation()), Compiled)
    assert processes() == [process]


def test_one_that_is_killed_costs_what_it_compiled_and_nothing_else() -> None:
    compilers = Compilers(1)
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        compiling = executor.submit(compilers.compile, asked(steps=100), Cancellation())
        wait_until(processes, "a compile process")
        os.kill(processes()[0].pid, signal.SIGKILL)
        with pytest.raises(CompilerDied, match="was killed by SIGKILL"):
            compiling.result()
    assert isinstance(compilers.compile(asked(), Cancellation()), Compiled)


def test_one_that_nobody_wants_any_more_is_killed() -> None:
    """Nobody waits for its end: neither who asked for it, nor who waits for the process; and the next one is as ever."""
    compilers, unwanted, behind = Compilers(1), Cancellation(), Cancellation()
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        compiling = executor.submit(compilers.compile, asked(steps=1000), unwanted)
        wait_until(processes, "a compile process")
        waiting = executor.submit(compilers.compile, asked(steps=1000), behind)
        behind.cancel()
        with pytest.raises(Cancelled):
            waiting.result()
        unwanted.cancel()
        with pytest.raises(Cancelled):
            compiling.result()
    assert isinstance(compilers.compile(asked(), Cancellation()), Compiled)


def test_one_that_takes_very_long_stands_before_nobody() -> None:
    compilers, unwanted = Compilers(1, long_seconds=0.5), Cancellation()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        compiling = executor.submit(compilers.compile, asked(steps=1000), unwanted)
        wait_until(processes, "a compile process")
        assert isinstance(compilers.compile(asked(), Cancellation()), Compiled)
        assert not compiling.done()
        unwanted.cancel()
        with pytest.raises(Cancelled):
            compiling.result()


def test_several_at_once_and_none_when_there_is_nothing_to_do() -> None:
    """Threads beyond the processes wait. A process that has ended is replaced when it is needed."""
    compilers = Compilers(2)
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        answers = list(executor.map(compilers.compile, [asked(steps=20)] * 4, [Cancellation()] * 4))
    assert [type(answer) for answer in answers] == [Compiled] * 4
    assert 1 <= len(processes()) <= 2
    wait_until(lambda: not processes(), "their end")
    assert isinstance(compilers.compile(asked(), Cancellation()), Compiled)


def test_it_ends_with_its_worker_in_the_middle_of_a_compilation(tmp_path: Path) -> None:
    (tmp_path / "asked").write_bytes(encoder.encode(asked(steps=300)))
    source = (
        "import sys\n"
        "from tensord.workers.compiling.compilers import Compilers\n"
        "from tensord.workers.compiling.records import TO_PROCESS\n"
        "from tensord.workers.threads.cancellation import Cancellation\n"
        "Compilers(1).compile(TO_PROCESS.decode(open(sys.argv[1], 'rb').read()), Cancellation())\n"
    )
    worker = psutil.Popen([sys.executable, "-c", source, str(tmp_path / "asked")])
    try:
        wait_until(worker.children, "a compile process")
        (process,) = worker.children()
        # XLA has threads of its own.
        wait_until(lambda: process.num_threads() > 3, "its compilation")
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: not process.is_running(), "its end")
