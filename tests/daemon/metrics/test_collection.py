"""The real supervisor with fake workers and fronts: what a scrape shows of those that die, are silent, or come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon.fake_daemon import PATIENCE, FakeDaemon, write_model
from tests.scrapes import Samples, scrape

COPIED = "tensord_copied_bytes_total"
SUCCESS = "nv_inference_request_success"


class Watched(FakeDaemon):
    """A fake daemon that can be scraped."""

    def scrape(self) -> Samples:
        return scrape(self.metrics)

    def until(self, condition: Callable[[Samples], bool], what: str) -> Samples:
        """Scrapes until the condition holds; returns the samples."""
        last: list[Samples] = []

        def holds() -> bool:
            last[:] = [self.scrape()]
            return condition(last[0])

        self.wait(holds, what)
        return last[0]

    def until_counted(self, workers: int) -> Samples:
        """Scrapes until both workers answer and ``workers`` workers, dead ones included, have counted a load of "good"."""
        return self.until(
            lambda samples: sum(answered(samples).values()) == 2 and samples.of(SUCCESS, "model") == {"good": workers},
            f"figures of {workers} workers",
        )


def answered(samples: Samples) -> dict[str, float]:
    return samples.of("tensord_worker_answered", "worker")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "good")
    return tmp_path / "models"


@pytest.fixture
def start(tmp_path: Path, repository: Path) -> Iterator[Callable[..., Watched]]:
    running: list[Watched] = []

    def begin(wait: bool = True, **options: dict[str, Any]) -> Watched:
        running.append(Watched(tmp_path, options))
        if wait:
            running[-1].wait_ready()
        return running[-1]

    yield begin
    for daemon in running:
        family = psutil.Process(daemon.process.pid).children() if daemon.process.poll() is None else []
        daemon.stop()
        assert not psutil.wait_procs(family, PATIENCE)[1]


def test_what_is_up(start: Callable[..., Watched]) -> None:
    daemon = start(http={"processes": 2})
    samples = daemon.until_counted(2)
    assert samples.of("tensord_worker_up", "worker") == {"worker-0": 1, "worker-1": 1}
    assert samples.of("tensord_worker_up", "device") == {"cpu:0": 1, "cpu:1": 1}
    assert samples.of("tensord_front_up", "front") == {"http-0": 1, "http-1": 1}
    assert samples.of("tensord_worker_restarts_total", "worker") == {"worker-0": 0, "worker-1": 0}
    assert samples.of("tensord_front_restarts_total", "front") == {"http-0": 0, "http-1": 0}
    memory = samples.of("tensord_process_resident_memory_bytes", "process")
    assert memory.keys() == {"supervisor", "http-0", "http-1", "worker-0", "worker-1"}
    assert min(memory.values()) > 1 << 20
    # Each fake worker counts its loads as requests and its process id as bytes, and says that two requests wait.
    assert samples.model(COPIED, "good") == sum(worker.pid for worker in daemon.workers)
    assert samples.model("nv_inference_pending_request_count", "good") == 4
    assert daemon.status()["metrics"] == f"http://{daemon.metrics}/metrics"


def test_a_worker_that_dies(start: Callable[..., Watched]) -> None:
    """
    1. Both workers are scraped. 2. One is killed, and replaced. 3. So is the other.
    Result: what they had said is kept, what their replacements say is added, and no scrape shows less than the one before.
    """
    daemon = start()
    daemon.until_counted(2)
    pids = {worker.pid for worker in daemon.workers}
    last = 0.0
    for deaths in (1, 2):
        worker = next(worker for worker in daemon.workers if worker.pid in pids)
        worker.kill()

        def replaced(samples: Samples, deaths: int = deaths) -> bool:
            nonlocal last
            assert samples.model(COPIED, "good") >= last
            last = samples.model(COPIED, "good")
            return sum(samples.of("tensord_worker_restarts_total", "worker").values()) == deaths

        daemon.until(replaced, "restart")
        samples = daemon.until_counted(2 + deaths)
        pids |= {worker.pid for worker in daemon.workers}
        assert samples.model(COPIED, "good") == sum(pids)
        assert samples.model("nv_inference_pending_request_count", "good") == 4


def test_why_processes_died(start: Callable[..., Watched]) -> None:
    """
    1. A worker is killed, a front by another signal, and the last worker hangs until it is killed.
    Result: each is counted under its cause, and nothing else is.
    """
    daemon = start(workers={"idle_timeout": 2.0})
    first, second = daemon.workers
    first.kill()
    daemon.fronts[0].send_signal(signal.SIGABRT)
    daemon.until(lambda samples: deaths(samples, "cause") == {"SIGKILL": 1, "SIGABRT": 1}, "two deaths")
    Path(os.environ["XDG_RUNTIME_DIR"], f"hang-{second.pid}").touch()

    def counted(samples: Samples) -> bool:
        return deaths(samples, "cause") == {"SIGKILL": 1, "SIGABRT": 1, "hung": 1}

    daemon.until(counted, "three deaths")
    assert deaths(daemon.scrape(), "process").keys() == {"worker-0", "worker-1", "http-0"}


def deaths(samples: Samples, label: str) -> dict[str, float]:
    """Returns the deaths that there were, by a label."""
    return {of: count for of, count in samples.of("tensord_process_deaths_total", label).items() if count}


def test_the_last_reload(start: Callable[..., Watched]) -> None:
    """
    1. The daemon starts. 2. A reload of a file that cannot be read. 3. A reload of one that can.
    Result: the last one's outcome, and when the last good one was.
    """
    good, when = "tensord_config_last_reload_successful", "tensord_config_last_reload_success_timestamp_seconds"
    daemon = start()
    samples = daemon.scrape()
    began = samples.value(when)
    assert samples.value(good) == 1
    text = daemon.file.read_text()
    daemon.file.write_text("[http]\nport = nonsense\n")
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.until(lambda samples: samples.value(good) == 0, "refused reload").value(when) == began
    daemon.file.write_text(text)
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.until(lambda samples: samples.value(good) == 1, "reload").value(when) > began


def test_a_worker_that_is_silent(start: Callable[..., Watched]) -> None:
    """
    1. A worker is stopped by a signal. 2. It goes on.
    Result: scrapes are answered all the time, with what it said last, and say that it did not answer.
    """
    daemon = start()
    before = daemon.until_counted(2)
    silent = daemon.workers[0]
    names = {worker["pid"]: worker["name"] for worker in daemon.status()["workers"]}
    expected = {name: float(pid != silent.pid) for pid, name in names.items()}
    silent.send_signal(signal.SIGSTOP)
    while silent.status() != psutil.STATUS_STOPPED:
        pass
    samples = daemon.until(lambda samples: answered(samples) == expected, f"{expected}")
    assert set(samples.of("tensord_worker_up", "worker").values()) == {1}
    assert samples.model(COPIED, "good") == before.model(COPIED, "good")
    silent.send_signal(signal.SIGCONT)
    daemon.until_counted(2)


def test_a_front_that_dies(start: Callable[..., Watched]) -> None:
    daemon = start()
    daemon.fronts[0].kill()
    daemon.until(
        lambda samples: samples.value("tensord_front_restarts_total", front="http-0", protocol="http") == 1, "restart"
    )
    daemon.until(lambda samples: samples.value("tensord_front_up", front="http-0", protocol="http") == 1, "front")


def test_while_it_starts(start: Callable[..., Watched], tmp_path: Path) -> None:
    """A load is never answered: there is no readiness, and figures nevertheless."""
    write_model(tmp_path / "models", "never")
    daemon = start(wait=False)
    samples = daemon.until_counted(2)
    assert samples.of(SUCCESS, "model").keys() == {"good"}
    assert "ready: " not in daemon.log


def test_models_come_and_go(start: Callable[..., Watched]) -> None:
    """A reload goes on counting; an unload takes the model away; what is loaded then begins anew."""
    daemon = start(repository={"control_mode": "explicit", "load": ["good"]})
    copied = daemon.until_counted(2).model(COPIED, "good")
    assert daemon.call("UnloadModel", name="good")[0] == ""
    daemon.wait(lambda: daemon.state("good")["state"] == "UNAVAILABLE", "unload")
    assert daemon.scrape().of(COPIED, "model") == {}
    assert daemon.call("LoadModel", name="good")[0] == ""
    assert daemon.until_counted(2).model(COPIED, "good") == copied


def test_without_metrics(start: Callable[..., Watched]) -> None:
    daemon = start(metrics={"enabled": False})
    assert daemon.status()["metrics"] is None
    assert "serving metrics" not in daemon.log
