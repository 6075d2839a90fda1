"""What tensorctl shows of processes."""

from __future__ import annotations

from typing import Any, cast

from tensord.config.options import Supervisor
from tensord.daemon.operator import process_list
from tensord.daemon.processes.child import Front, Worker
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.posts import Posts
from tensord.shm.control_records import Load
from tensord.shm.progress import Loading
from tensord.shm.status_page import Outputs, StatusPage, WorkerState

SECOND = 10**9


def posts() -> Posts:
    return Posts(Supervisor(), lambda _: True, lambda _: False)


def test_workers() -> None:
    starting, executing = (Worker("m", f"worker-{n}", n, f"cpu:{n}", lambda *_: None, lambda _: None) for n in (0, 1))
    executing.started_ns, executing.ready = 3 * SECOND, True
    executing.page = StatusPage.create()
    executing.page.set_state(WorkerState.EXECUTING, 4 * SECOND)
    executing.page.outputs = Outputs.IN_PLACE
    first, second = process_list.of_workers([starting, executing], posts(), 5 * SECOND)
    assert first == {
        "name": "worker-0",
        "pid": 0,
        "ready": False,
        "uptime_s": 5.0,
        "deaths": 0,
        "device": "cpu:0",
        "state": "starting",
        "outputs": "unknown",
        "missing": [],
    }
    assert (second["state"], second["ready"], second["uptime_s"]) == ("executing", True, 2.0)
    # What the loader does beside the loop.
    executing.send(Load("digits", 1, "", "", b""))
    (entry,) = process_list.of_workers([executing], posts(), 5 * SECOND)
    assert entry["state"].startswith("executing, loading digits, ")
    executing.loading = Loading("digits", 1, 3, 16, 1)
    executing.page.set_state(WorkerState.IDLE, 4 * SECOND)
    (entry,) = process_list.of_workers([executing], posts(), 5 * SECOND)
    assert entry["state"].startswith("compiling digits 3/16, 1 from the cache, ")
    executing.load_answered("digits", 1)
    (entry,) = process_list.of_workers([executing], posts(), 5 * SECOND)
    assert entry["state"] == "idle"
    assert second["outputs"] == "in_place"
    executing.release()


def test_fronts() -> None:
    class Two:
        """Their connections by row."""

        def __iter__(self) -> Any:
            return iter([Front("m", "http", row, row, lambda *_: None, lambda _: None) for row in (0, 1)])

        def connections(self, front: Front) -> int:
            return front.row * 7

    listed = process_list.of_fronts(cast(Fronts, Two()), posts(), SECOND)
    assert [(entry["name"], entry["connections"]) for entry in listed] == [("http-0", 0), ("http-1", 7)]


def test_a_worker_that_one_model_has_to_itself() -> None:
    worker = Worker("m", "worker-1#digits", 3, "cuda:1#digits", lambda *_: None, lambda _: None)
    worker.memory_fraction = 0.25
    (entry,) = process_list.of_workers([worker], posts(), SECOND)
    assert (entry["device"], entry["isolated"], entry["memory_fraction"]) == ("cuda:1", "digits", 0.25)
