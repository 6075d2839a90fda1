"""Fixtures: one real daemon a module, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, settings

from tensord.daemon.grpc.server import GrpcFront
from tensord.shm.cuda_regions import Context, Driver
from tensord.shm.extensions import STALE, missing
from tensord.workers.native.extensions import PARTS
from tests import on_stub, run_folder
from tests.cuda_owner import CudaOwner
from tests.cuda_stub.library import CudaStub
from tests.daemon_process import DaemonOf, DaemonProcess, nothing_left_behind

# No test asserts a time, on a busy machine least of all. The same examples everywhere, so that a change is judged by what it
# changes, and not many; `make test ARGS=--hypothesis-profile=search` looks for others, and for more (tests/generated.py).
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False)
settings.register_profile("tensord", settings.get_profile("search"), derandomize=True, database=None, max_examples=40)
settings.load_profile("tensord")

# Of whoever runs the tests: nothing may depend on it.
os.environ.pop("PYTHONUNBUFFERED", None)

_HERE = Path(__file__).parent
#: Files that take half a minute of a processor, or wait that long, besides those that start daemons.
_LONG = (
    "systemd/test_operations_page.py",
    "bench/test_route.py",
    "daemon/test_cli.py",
    "daemon/test_ctl.py",
    "daemon/test_failures.py",
    "daemon/test_supervisor.py",
    "deploy/test_haproxy.py",
    "deploy/test_slurm.py",
    "simulation/test_simulation.py",
    "workers/parameters/test_named_sets.py",
    "workers/parameters/test_on_demand.py",
    "workers/parameters/test_swapping.py",
    "workers/programs/test_carry.py",
    "workers/programs/test_grouped_calls.py",
    "workers/scheduling/test_step_batcher.py",
    "workers/test_extreme_configurations.py",
)

# Here and not when pytest is configured: by then it has imported the conftest of a folder that its command line names.
_run_folder_gone = run_folder.make()
# As in a CPU worker (workers/devices/device.py); the back end takes it when the first test module that needs one opens it.
jax.config.update("jax_cpu_enable_async_dispatch", False)


def pytest_addoption(parser: pytest.Parser) -> None:
    on_stub.add_option(parser)
    parser.addoption(
        "--from-index", action="store_true", help="installs the wheel into an empty environment of each Python, by pip"
    )
    parser.addoption("--release", action="store_true", help="runs also what is left for a release: tests marked so")
    parser.addoption(
        "--store-work", action="store_true", help="tests/work: stores what ways cost as what they may cost"
    )


def pytest_configure(config: pytest.Config) -> None:
    on_stub.configure(config)
    # Without bytecode each of hundreds of processes compiles what it imports, and each of pytest's rewrites all tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    config.add_cleanup(_run_folder_gone)
    # Each would fail a hundred tests, for another reason each time.
    if stale := [said for said in missing({**PARTS, **GrpcFront.parts}) if STALE in said]:
        pytest.exit(f"build the package again (pip install -e .): {'; '.join(stale)}", 2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Each of pytest's processes makes ten thousand items, none of which is garbage: looking for it takes a seventh of the time.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Moves files that take long to the front.

    So no process still works on one of them when the others have ended.
    """
    long = {item.path for item in items if isinstance(item, pytest.Function) and _starts_daemons(item)}
    long |= {_HERE / name for name in _LONG}
    items.sort(key=lambda item: item.path not in long)
    on_stub.skip(items)
    if not config.getoption("--release"):
        for item in items:
            for mark in item.iter_markers("release"):
                item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]}: make test-release"))


def _starts_daemons(item: pytest.Function) -> bool:
    return "daemon" in item.fixturenames or any(value is DaemonProcess for value in vars(item.module).values())


@pytest.fixture(autouse=True, scope="session")
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the sockets of the tests' daemons away from the folder where the user's own daemon has its socket."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(autouse=True, scope="module")
def leaves_nothing() -> Iterator[None]:
    """Fails if a module of tests ends with more processes or descriptors than it began with."""
    # What is there by now stays. A collection in a test need not walk through all of JAX each time, which takes 0.3 s.
    gc.collect()
    gc.freeze()
    with nothing_left_behind():
        yield


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Yields a function that starts daemons, which live until the test ends."""
    started: list[DaemonProcess] = []

    def start(*repositories: Path, **options: dict[str, Any]) -> DaemonProcess:
        folder = tmp_path / f"daemon-{len(started)}"
        folder.mkdir()
        daemon = DaemonProcess(folder, repositories, options)
        started.append(daemon)
        daemon.start()
        return daemon

    yield start
    for daemon in started:
        daemon.stop()


@pytest.fixture(scope="module")
def daemon_of(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonOf]:
    """Yields a function that starts a daemon with one repository, which is ready and lives until the module ends.

    Its other arguments are those of ``DaemonProcess``; ``folder``: a new one, if not given.
    """
    with contextlib.ExitStack() as running:

        def start(repository: Path, *arguments: Any, folder: Path | None = None, **more: Any) -> DaemonProcess:
            folder = folder or tmp_path_factory.mktemp("daemon")
            return running.enter_context(DaemonProcess(folder, [repository], *arguments, **more))

        yield start


@pytest.fixture(scope="session")
def cuda_stub(tmp_path_factory: pytest.TempPathFactory) -> CudaStub:
    """Loads the stand-in for the CUDA driver into this process. Device memory is readable here, as arrays of XLA:CPU."""
    stub = CudaStub(tmp_path_factory.mktemp("cuda"), devices=2, delay_us=200)
    stub.load()
    return stub


@pytest.fixture
def driver(cuda_stub: CudaStub) -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


@pytest.fixture
def context(driver: Driver) -> Context:
    return driver.context(0)


@pytest.fixture
def cuda_owner(cuda_stub: CudaStub) -> Iterator[CudaOwner]:
    """Starts another process with memory on the same devices."""
    with CudaOwner(os.environ | cuda_stub.environment) as owner:
        yield owner
