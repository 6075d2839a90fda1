"""Parameters that are pushed while workers and fronts are killed: every answer is of one set, and of none that is too old.

A set's number is also what its arrays hold, so an answer says twice by which it was computed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tensord_client
from tensord_client import Replaced, ServingError, Unavailable
from tensord_client.parameters import layout

from tests.daemon_process import PATIENCE, DaemonProcess, wait_until
from tests.faults.load import Load
from tests.repositories import applying, write_model

#: Disturbances of the run under load, one of each kind; a run by hand may ask for more.
KILLS = int(os.environ.get("TENSORD_TEST_KILLS", "6"))
MODEL = applying(
    """
    first, last = params["a"], params["b"]
    ends = jnp.stack([first.min(), first.max(), last[0]])
    return {"y": inputs["x"] * 0 + ends}
    """,
    "x FP32[1]",
    "y FP32[3]",
    more="max_batch_size = 8",
    params='{"a": jnp.zeros((512, 520)), "b": jnp.zeros(3)}',
)


def tree(number: int) -> dict[str, Any]:
    return {"a": np.full((512, 520), number, np.float32), "b": np.full(3, number, np.float32)}


def pushed_to(start_daemon: Callable[..., DaemonProcess], folder: Path, **options: Any) -> DaemonProcess:
    repository = folder / "repository"
    if not repository.exists():
        write_model(repository, "m", MODEL)
    sections = {
        "workers": {"device": "cpu", "cpu": 2, "pin": False, **options.pop("workers", {})},
        "http": {"port": 0, "processes": 2},
        "clients": {"socket": str(folder / "clients.sock")},
        "supervisor": {"control_socket": str(folder / "control.sock"), **options.pop("supervisor", {})},
        **options,
    }
    daemon = start_daemon(repository, **sections)
    daemon.wait_ready()
    # It is ready with one of them.
    daemon.wait_log("model 'm' version 1 is ready", int(str(sections["workers"]["cpu"])))
    return daemon


class Answers(Load):
    """Clients that check that each answer is of one set, not older than the pushes that were answered before its request."""

    def __init__(self, daemon: DaemonProcess, clients: int, where: str) -> None:
        super().__init__(daemon, clients)
        self._where = where
        #: The highest number whose push was answered, since the model was last loaded.
        self.answered = 0
        #: How often the model has begun to be loaded anew, and has been: twice the loads, or odd while one is under way.
        self.loads = 0
        #: All pushes that were answered, and those of each pusher.
        self.pushes = 0
        self.pushed: Counter[object] = Counter()
        #: What was wrong with answers.
        self.mixed: list[Any] = []
        self.old: list[Any] = []
        self.seen: Counter[int] = Counter()

    def forget_pushes(self, lock: threading.Lock) -> None:
        """Is called before the model is loaded anew, which ends what was pushed, and when it has been."""
        with lock:
            self.loads += 1
            self.answered = 0

    def _run(self, seed: int) -> None:
        with tensord_client.connect(self._where, patience=PATIENCE) as client:
            model = client.model("m", timeout=PATIENCE)
            while not self._stop.is_set():
                loads, least = self.loads, self.answered
                try:
                    answer = model({"x": [[1.0]]}, parameters={"tensord_parameters": True})
                except ServingError as error:
                    with self._lock:
                        self.errors.append(f"{type(error).__name__}: {error}")
                    continue
                values, number = set(answer["y"][0].tolist()), answer.parameters["parameter_version"]
                with self._lock:
                    self.answers += 1
                    self.seen[number] += 1
                    if values != {number}:
                        self.mixed.append((number, values))
                    if number < least and loads == self.loads:
                        self.old.append((number, least))


#: Pushes one number.
Push = Callable[[int], None]


@contextlib.contextmanager
def from_client(where: str) -> Iterator[Push]:
    """Pushes trees, each in memory of its own over a lane, or as the body of a request over HTTP."""
    with tensord_client.connect(where, patience=PATIENCE) as client:
        parameters = client.model("m", timeout=PATIENCE).parameters
        yield lambda number: parameters.update(tree(number), version=number, check_finite=True) and None


@contextlib.contextmanager
def from_region(daemon: DaemonProcess) -> Iterator[Push]:
    """Pushes from one registered region, whose content changes as soon as a push is answered."""
    path = Path("/dev/shm", f"tensord-test-{os.getpid()}-pusher")
    said = {
        "key": f"/{path.name}",
        "offset": 0,
        "byte_size": sum(len(memoryview(each).cast("B")) for each in layout(tree(0))),
    }
    with open(path, "w+b", buffering=0) as memory:
        try:
            os.truncate(memory.fileno(), said["byte_size"])
            status, answer = daemon.request(
                "POST", "/v2/systemsharedmemory/region/pusher/register", json.dumps(said).encode()
            )
            assert status == 200, answer

            def push(number: int) -> None:
                os.pwrite(memory.fileno(), b"".join(layout(tree(number))), 0)
                wanted = {"region": "pusher", "number": number, "check_finite": True}
                try:
                    status, answer = daemon.request("POST", "/v2/models/m/parameters/main", json.dumps(wanted).encode())
                except (OSError, http.client.HTTPException) as error:
                    raise Unavailable(f"the front died: {error}") from error
                finally:
                    # Nothing of what is written after the answer is ever seen.
                    os.pwrite(memory.fileno(), b"\0" * 4096, said["byte_size"] // 2)
                if status == 409:
                    raise Replaced(answer.decode())
                if status != 200:
                    raise Unavailable(answer.decode())

            yield push
        finally:
            path.unlink()


def pusher(
    pushing: contextlib.AbstractContextManager[Push],
    answers: Answers,
    stop: threading.Event,
    errors: Counter[str],
    lock: threading.Lock,
) -> None:
    """Pushes numbers that it shares with the others: each is one more than the highest that it knows of."""
    with pushing as push:
        number = 0
        while not stop.is_set():
            with lock:
                number, loads = max(number, answers.answered) + 1, answers.loads
            try:
                push(number)
            except Replaced:
                errors["overtaken"] += 1
                continue
            except ServingError as error:
                # Whether it holds is unknown where the front died: the next one is higher anyhow.
                errors[f"{type(error).__name__}: {error}"] += 1
                continue
            with lock:
                answers.pushes += 1
                answers.pushed[pushing] += 1
                if loads == answers.loads and not loads % 2:
                    answers.answered = max(answers.answered, number)


def disturb(daemon: DaemonProcess, number: int, answers: Answers, lock: threading.Lock) -> None:
    """Kills a worker or a front, stops a worker for a while, or loads the model anew, in turn."""
    worker, kind = daemon.workers[number % 2], number % 6
    if kind == 4:
        worker.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        worker.send_signal(signal.SIGCONT)
    elif kind == 5:
        answers.forget_pushes(lock)
        assert daemon.request("POST", "/v2/repository/models/m/load", b"{}")[0] == 200
        answers.forget_pushes(lock)
    else:
        victim = daemon.fronts[0] if kind == 3 else worker
        victim.kill()
        psutil.wait_procs([victim], timeout=PATIENCE)


@pytest.mark.parametrize("way", ["http", "lane"])
def test_two_pushers_and_killed_workers_and_fronts(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path, way: str
) -> None:
    """
    1. Eight clients ask without pause, two pushers push as fast as they can, one of them from a region. 2. Workers and fronts
    are killed in turn, a worker is stopped, the model is loaded anew.
    Result: no answer mixes two sets, none is older than a push that was answered before, none failed.
    """
    daemon = pushed_to(start_daemon, tmp_path, repository={"control_mode": "explicit", "load": ["m"]})
    where = str(tmp_path / "clients.sock") if way == "lane" else daemon.url
    stop, lock, errors = threading.Event(), threading.Lock(), Counter[str]()
    with Answers(daemon, 8, where) as answers:
        ways = from_client(where), from_region(daemon)
        pushers = [threading.Thread(target=pusher, args=(each, answers, stop, errors, lock)) for each in ways]
        for each in pushers:
            each.start()
        try:
            for number in range(KILLS):
                before, pushed = answers.answers, answers.pushes
                wait_until(lambda seen=before: answers.answers > seen + 100, "answers", daemon)
                wait_until(lambda seen=pushed: answers.pushes > seen + 3, "pushes", daemon)
                wait_until(lambda: len(daemon.workers) == 2 and len(daemon.fronts) == 2, "all processes", daemon)
                disturb(daemon, number, answers, lock)
            pushed = answers.pushes
            wait_until(lambda: answers.pushes > pushed + 3, "pushes after the last disturbance", daemon)
        finally:
            stop.set()
            for each in pushers:
                each.join(PATIENCE)
    assert (answers.mixed[:3], answers.old[:3]) == ([], [])
    assert answers.errors == []
    assert len(answers.seen) > KILLS
    assert len(answers.pushed) == 2, errors
    assert "did not follow" not in daemon.log
    daemon.wait_ready()


class Everywhere(Load):
    """Clients that ask one model each without pause, over ways by turns, and check that what was pushed answers."""

    def __init__(self, daemon: DaemonProcess, clients: int, ways: Sequence[str], numbers: dict[str, int]) -> None:
        super().__init__(daemon, clients)
        self._ways, self._numbers = ways, list(numbers.items())
        self._each: Counter[int] = Counter()
        self._clients = clients

    def wait_all(self) -> None:
        """Returns when each of them has had a few answers more: a request that two deaths meet is given up."""
        seen = self._each.copy()
        wait_until(
            lambda: self.errors or all(self._each[i] > seen[i] + 3 for i in range(self._clients)),
            "answers",
            self._daemon,
        )

    def _run(self, seed: int) -> None:
        name, number = self._numbers[seed % len(self._numbers)]
        with tensord_client.connect(self._ways[seed % len(self._ways)], patience=PATIENCE) as client:
            model = client.model(name, timeout=PATIENCE)
            while not self._stop.is_set():
                try:
                    found = set(model({"x": [[1.0]]})["y"][0].tolist())
                except ServingError as error:
                    with self._lock:
                        self.errors.append(f"{type(error).__name__}: {error}")
                    continue
                with self._lock:
                    self.answers += 1
                    self._each[seed] += 1
                    self.wrong += found != {number}


def test_no_request_meets_a_replacement_that_does_not_serve_yet(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    """
    1. Fourteen clients ask seven models, into each of which something was pushed, without pause. 2. Their one worker is killed,
    again and again.
    Result: all requests wait for a worker that has what was pushed, and for it to say that it serves: none fails.
    """
    numbers = {f"m{number}": number for number in range(1, 8)}
    for name in numbers:
        write_model(tmp_path / "repository", name, MODEL)
    daemon = start_daemon(
        tmp_path / "repository",
        workers={"device": "cpu", "pin": False},
        http={"port": 0, "processes": 2},
        clients={"socket": str(tmp_path / "clients.sock")},
    )
    daemon.wait_ready()
    with tensord_client.connect(daemon.url, patience=PATIENCE) as client:
        for name, number in numbers.items():
            client.model(name, timeout=PATIENCE).parameters.update(tree(number))
    with Everywhere(daemon, 14, (daemon.url, str(tmp_path / "clients.sock")), numbers) as clients:
        for number in range(KILLS // 2):
            clients.wait_all()
            (victim,) = daemon.workers
            victim.kill()
            psutil.wait_procs([victim], timeout=PATIENCE)
            daemon.wait_log("has what was pushed into model", len(numbers) * (number + 1))
        clients.wait_all()
    assert (clients.errors[:3], clients.wrong) == ([], 0), f"{len(clients.errors)} of {clients.answers}"


def test_a_stopped_worker_holds_a_push_up_and_nobody_else(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    """
    1. One of two workers is stopped (SIGSTOP) and something is pushed. 2. It goes on.
    Result: the push is answered then, and every answer is of one set meanwhile.
    """
    daemon = pushed_to(start_daemon, tmp_path)
    stopped = daemon.workers[0]
    with tensord_client.connect(daemon.url, patience=PATIENCE) as client:
        parameters = client.model("m", timeout=PATIENCE).parameters
        parameters.update(tree(1), version=1)
        stopped.send_signal(signal.SIGSTOP)
        done = threading.Thread(target=lambda: parameters.update(tree(2), version=2))
        try:
            done.start()
            time.sleep(0.5)
            assert done.is_alive()
        finally:
            stopped.send_signal(signal.SIGCONT)
        done.join(PATIENCE)
        assert not done.is_alive()
        asked = client.model("m", timeout=PATIENCE)
        assert {asked({"x": [[1.0]]})["y"][0, 0] for _ in range(8)} == {2}
