"""Tests what a configuration says of instances and queues, kept over all workers of a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_process import DaemonOf, DaemonProcess, wait_until
from tests.repositories import sleepy_model


def with_config(repository: Path, name: str, text: str) -> None:
    """Writes a model that waits as long as a request says, with additional configuration."""
    sleepy_model(repository, name)
    path = repository / name / "config.pbtxt"
    path.write_text(path.read_text() + text)


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("instances")
    models = folder / "models"
    with_config(models, "bounded", "dynamic_batching { default_queue_policy { max_queue_size: 3 } }")
    with_config(
        models, "ordered", "dynamic_batching { preserve_ordering: true } instance_group { count: 2 kind: KIND_CPU }"
    )
    resources = ("one", "R", "2"), ("other", "r", "2"), ("free", "Q", "1"), ("greedy", "R", "3")
    for name, resource, count in (*resources, ("worldwide", "q", "1 global: true")):
        needs = f'rate_limiter {{ resources {{ name: "{resource}" count: {count} }} }}'
        with_config(models, name, f"instance_group {{ count: 1 kind: KIND_CPU {needs} }}")
    with_config(models, "passive", "instance_group { count: 1 kind: KIND_CPU passive: true }")
    with_config(models, "both", "instance_group [ { count: 1 passive: true }, { count: 1 } ]")
    options: dict[str, dict[str, Any]] = {
        "workers": {"device": "cpu", "pin": False, "cpu": 2},
        "rate_limit": {"mode": "execution_count", "resources": ["R:2"]},
        "repository": {"strict_readiness": False},
    }
    return daemon_of(models, options, folder=folder)


class Asker:
    """Sends requests that wait in their models until the test lets them go."""

    def __init__(self, daemon: DaemonProcess, folder: Path) -> None:
        self._daemon = daemon
        self._folder = folder
        self._threads = ThreadPoolExecutor(64)

    def ask(self, model: str, name: str) -> Future[tuple[int, Any]]:
        """Sends a request that touches the file ``name`` when it runs, and waits for the file ``name-go``."""
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


def test_answers_leave_in_the_order_in_which_requests_were_taken(daemon: DaemonProcess, asker: Asker) -> None:
    first = asker.ask("ordered", "first")
    asker.begun("first")
    second = asker.ask("ordered", "second")
    asker.begun("second")
    asker.go("second")
    third = asker.ask("ordered", "third")
    # It runs where the second one did, so that one is done; its answer waits for the first.
    asker.begun("third")
    assert not second.done()
    asker.go("first", "third")
    assert [each.result()[0] for each in (first, second, third)] == [200, 200, 200]


@pytest.mark.cpu_workers("they share what they need, each GPU has its own")
def test_instances_run_while_they_have_what_they_need(daemon: DaemonProcess, asker: Asker) -> None:
    """Names of resources are the same in any case, and one that needs something else does not wait."""
    one = asker.ask("one", "a")
    asker.begun("a")
    other = asker.ask("other", "b")
    free = asker.ask("free", "c")
    asker.begun("c")
    asker.go("c")
    assert free.result()[0] == 200
    assert not asker.has_begun("b")
    asker.go("a")
    assert one.result()[0] == 200
    asker.begun("b")
    again = asker.ask("one", "d")
    asker.go("b", "d")
    assert [other.result()[0], again.result()[0]] == [200, 200]


def test_an_instance_that_could_never_run_is_not_loaded(daemon: DaemonProcess) -> None:
    daemon.wait_log(
        "model 'greedy' version 1 failed to load: Resource count for \"r\" is limited to 2 which will prevent "
        "scheduling of one or more model instances, the minimum required count is 3"
    )
    assert daemon.get("/v2/models/greedy/ready")[0] == 400


def test_a_resource_is_global_in_all_models_or_in_none(daemon: DaemonProcess) -> None:
    index = json.loads(daemon.request("POST", "/v2/repository/index", b"")[1])
    (entry,) = [each for each in index if each["name"] == "worldwide"]
    assert entry["state"] == "UNAVAILABLE"
    assert entry["reason"] == (
        'Resource "q" is present as both global and device-specific resource in the model configuration: it is global in model '
        "'worldwide', one of each device in model 'free'"
    )


def test_passive_instances_hold_their_model_and_take_no_requests(daemon: DaemonProcess, asker: Asker) -> None:
    assert daemon.get("/v2/models/passive/ready")[0] == 200
    status, answer = asker.ask("passive", "a").result()
    assert (status, answer["error"]) == (400, "model 'passive' has only passive instances, which take no requests")
    # One beside it does.
    first, second = asker.ask("both", "b"), asker.ask("both", "c")
    asker.go("b", "c")
    assert [first.result()[0], second.result()[0]] == [200, 200]
