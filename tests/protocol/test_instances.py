"""What a configuration says of instances and queues, kept over all workers of a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import DaemonProcess, wait_until
from tests.repositories import sleepy_model


def with_config(repository: Path, name: str, text: str) -> None:
    """A model that waits as long as it is told, with more in its configuration."""
    sleepy_model(repository, name)
    path = repository / name / "config.pbtxt"
    path.write_text(path.read_text() + text)


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("instances")
    models = folder / "models"
    with_config(models, "bounded", "dynamic_batching { default_queue_policy { max_queue_size: 3 } }")
    with DaemonProcess(folder, [models], {"workers": {"device": "cpu", "pin": False, "cpu": 2}}) as running:
        running.wait_ready()
        yield running


class Asker:
    """Requests that wait in their models until they may go."""

    def __init__(self, daemon: DaemonProcess, folder: Path) -> None:
        self._daemon = daemon
        self._folder = folder
        self._threads = ThreadPoolExecutor(64)

    def ask(self, model: str, name: str) -> Future[tuple[int, Any]]:
        """Of that name: it touches a file of it, and waits for ``go`` with that name."""
        x = [{"name": "DELAY_MS", "datatype": "INT32", "shape": [1], "data": [0]}]
        told = {"began": str(self._folder / name), "until": str(self._folder / f"{name}-go")}
        return self._threads.submit(self._daemon.infer, model, x, parameters=told, id=name)

    def has_begun(self, name: str) -> bool:
        return (self._folder / name).exists()

    def begun(self, *names: str) -> None:
        """Waits until they run."""
        wait_until(lambda: all(map(self.has_begun, names)), f"{names} to run", self._daemon)

    def go(self, *names: str) -> None:
        for name in names:
            (self._folder / f"{name}-go").touch()

    def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture
def asker(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Asker]:
    made = Asker(daemon, tmp_path)
    yield made
    made.close()


def test_a_bound_on_a_queue_holds_over_all_workers(daemon: DaemonProcess, asker: Asker) -> None:
    """One runs, three may wait, on whichever worker; the seven others are refused at once."""
    first = asker.ask("bounded", "first")
    asker.begun("first")
    others = {f"other{number}": asker.ask("bounded", f"other{number}") for number in range(10)}
    wait_until(lambda: sum(each.done() for each in others.values()) == 7, "seven to be refused", daemon)
    refused = [each.result() for each in others.values() if each.done()]
    assert {status for status, _ in refused} == {503}
    assert all(answer["error"].endswith("Exceeds maximum queue size") for _, answer in refused)
    asker.go("first", *others)
    wait([first, *others.values()])
    assert sorted(each.result()[0] for each in (first, *others.values())) == 4 * [200] + 7 * [503]
