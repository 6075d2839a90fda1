"""Tests what tensorctl shows of processes."""

from __future__ import annotations

from typing import Any, cast

from tensord.config.options import Expert
from tensord.daemon.control.shared_counters import SharedCounters
from tensord.daemon.operator import listings
from tensord.daemon.processes.child import FrontProcess, WorkerProcess
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.process_slots import ProcessSlots
from tensord.shm.control_records import Load, Loading
from tensord.shm.status_page import Outputs, StatusPage, WorkerState, model_key

SECOND = 10**9
MODELS = {"digits": [1, 2], "scale": [3]}


def slots() -> ProcessSlots:
    return ProcessSlots(Expert(), lambda _: True, lambda _: False)


def test_workers() -> None:
    starting, executing = (WorkerProcess(f"worker-{n}", n, f"cpu:{n}", lambda *_: None, lambda _: None) for n in (0, 1))
    executing.started_ns, executing.ready = 3 * SECOND, True
    executing.page = StatusPage.create()
    executing.page.set_state(WorkerState.EXECUTING, 4 * SECOND)
    executing.page.outputs = Outputs.IN_PLACE
    first, second = listings.of_workers([starting, executing], slots(), MODELS, {"worker-1": 3}, 5 * SECOND)
    assert first == {
        "name": "worker-0",
        "pid": 0,
        "ready": False,
        "uptime_s": 5.0,
        "deaths": 0,
        "device": "cpu:0",
        "lanes": 0,
        "state": "starting",
        "outputs": "unknown",
        "oldest_execution": None,
        "oldest_load": None,
        "missing": [],
    }
    assert (second["state"], second["ready"], second["uptime_s"], second["lanes"]) == ("executing", True, 2.0, 3)
    # What the loader does beside the loop.
    executing.send(Load("digits", 1, "", "", b""))
    (entry,) = listings.of_workers([executing], slots(), MODELS, {}, 5 * SECOND)
    assert entry["state"].startswith("executing, loading digits, ")
    executing.loading = Loading("digits", 1, 3, 16, 1)
    executing.page.set_state(WorkerState.IDLE, 4 * SECOND)
    (entry,) = listings.of_workers([executing], slots(), MODELS, {}, 5 * SECOND)
    assert entry["state"].startswith("compiling digits 3/16, 1 from the cache, ")
    executing.load_answered("digits", 1)
    (entry,) = listings.of_workers([executing], slots(), MODELS, {}, 5 * SECOND)
    assert entry["state"] == "idle"
    assert second["outputs"] == "in_place"
    executing.release()


def test_what_a_worker_has_been_at_for_longest() -> None:
    """The list shows the oldest of a worker's runs and loads; a load that waits is not counted."""
    worker = WorkerProcess("worker-0", 0, "cpu:0", lambda *_: None, lambda _: None)
    worker.page = StatusPage.create()

    def entry() -> dict[str, Any]:
        return listings.of_workers([worker], slots(), MODELS, {}, 10 * SECOND)[0]

    worker.page.begin(4, [(1, 2)], model_key("digits", 2), 7 * SECOND)
    worker.page.begin(5, [(1, 3)], model_key("gone", 1), 8 * SECOND)
    assert entry()["oldest_execution"] == {"model": "digits", "version": 2, "seconds": 3.0}
    worker.page.begin(0, [(1, 4)], model_key("scale", 3), 6 * SECOND)
    assert entry()["oldest_execution"] == {"model": "scale", "version": 3, "seconds": 4.0}
    worker.page.end(0, 9 * SECOND)
    worker.page.end(4, 9)
    assert entry()["oldest_execution"] == {"model": "?", "version": 0, "seconds": 2.0}
    worker.page.end(5, 9)
    assert entry()["oldest_execution"] is None
    for name in ("first", "second"):
        worker.send(Load(name, 1, "", "", b""))
    assert entry()["oldest_load"] is None
    worker.load_progressed(Loading("second", 1))
    worker.load_progressed(Loading("first", 1))
    worker.load_progressed(Loading("second", 1, 3, 16, 1))
    assert entry()["oldest_load"]["model"] == "second"
    worker.load_answered("second", 1)
    assert entry()["oldest_load"]["model"] == "first"
    worker.load_answered("first", 1)
    assert entry()["oldest_load"] is None
    worker.release()


def test_fronts() -> None:
    counters = SharedCounters.create()

    class Two:
        """Their connections by row."""

        def __iter__(self) -> Any:
            return iter([FrontProcess("http", row, counters, row, lambda *_: None, lambda _: None) for row in (0, 1)])

        def connections(self, front: FrontProcess) -> int:
            return front.row * 7

    listed = listings.of_fronts(cast(Fronts, Two()), slots(), SECOND)
    assert [(entry["name"], entry["connections"]) for entry in listed] == [("http-0", 0), ("http-1", 7)]
    counters.close()


def test_a_worker_that_one_model_has_to_itself() -> None:
    worker = WorkerProcess("worker-1#digits", 3, "cuda:1#digits", lambda *_: None, lambda _: None)
    worker.memory_fraction = 0.25
    (entry,) = listings.of_workers([worker], slots(), MODELS, {}, SECOND)
    assert (entry["device"], entry["isolated"], entry["memory_fraction"]) == ("cuda:1", "digits", 0.25)
