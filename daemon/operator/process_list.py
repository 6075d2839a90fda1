"""Lists the daemon's processes for ``tensorctl status``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensord.daemon.processes.child import Child, WorkerProcess
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.process_slots import ProcessSlots
from tensord.shm import device_names
from tensord.shm.status_page import model_key


def of_fronts(fronts: Fronts, slots: ProcessSlots, now_ns: int) -> list[dict[str, Any]]:
    """Returns a description of each front process, with its number of client connections.

    ``slots``: counts the deaths of processes. ``now_ns``: CLOCK_MONOTONIC.
    """
    return [_entry(front, slots, now_ns) | {"connections": fronts.connections(front)} for front in fronts]


def of_workers(
    workers: Iterable[WorkerProcess],
    slots: ProcessSlots,
    models: Mapping[str, Iterable[int]],
    lanes: Mapping[str, int],
    now_ns: int,
) -> list[dict[str, Any]]:
    """Returns a description of each worker process, with its device, its state and what it runs now.

    Args:
      slots: counts the deaths of processes.
      models: name -> versions of each model that workers may serve.
      lanes: name of a worker -> how many lanes clients have to it.
      now_ns: CLOCK_MONOTONIC.
    """
    names = {model_key(name, version): (name, version) for name, versions in models.items() for version in versions}
    return [
        _entry(worker, slots, now_ns)
        | {
            "device": device_names.shared(worker.device),
            "lanes": lanes.get(worker.name, 0),
            "state": _state(worker),
            "outputs": _outputs(worker),
            "oldest_execution": _oldest_execution(worker, names, now_ns),
            "oldest_load": None if worker.oldest_load is None else _since(*worker.oldest_load, now_ns),
        }
        | _own(worker)
        | _cores(worker.pid)
        for worker in workers
    ]


def _state(worker: WorkerProcess) -> str:
    """Describes what a worker's loop and loader are doing: ``idle``, ``compiling digits 3/16``, ``executing, loading digits``."""
    state = worker.page.state[0].name.lower() if worker.page else "starting"
    loading = worker.describe_load()
    return loading if loading and state == "idle" else f"{state}, {loading}" if loading else state


def _outputs(worker: WorkerProcess) -> str:
    return worker.page.outputs.name.lower() if worker.page else "unknown"


def _own(worker: WorkerProcess) -> dict[str, Any]:
    """Returns the isolated model that a worker serves and the part of its GPU's memory; empty if models share the worker."""
    part = {"memory_fraction": worker.memory_fraction} if worker.memory_fraction else {}
    return {"isolated": worker.model, **part} if worker.model else {}


def _oldest_execution(
    worker: WorkerProcess, names: Mapping[int, tuple[str, int]], now_ns: int
) -> dict[str, Any] | None:
    running = None if worker.page is None else worker.page.oldest()
    # A version that is gone from the repository and still runs has no name here.
    return None if running is None else _since(*names.get(running.model, ("?", 0)), running.since_ns, now_ns)


def _since(model: str, version: int, since_ns: int, now_ns: int) -> dict[str, Any]:
    return {"model": model, "version": version, "seconds": round(max(0, now_ns - since_ns) / 1e9, 3)}


def _cores(pid: int) -> dict[str, Any]:
    """Reads from the kernel which cores a process may use, its number of threads, and its memory in MiB without GPU memory.

    Empty: the process has ended.
    """
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        return {
            "cores": values["Cpus_allowed_list"].strip(),
            "threads": int(values["Threads"]),
            "memory_mib": int(values.get("VmRSS", "0").split()[0]) >> 10,
        }
    return {}  # it has just ended


def _entry(child: Child, slots: ProcessSlots, now_ns: int) -> dict[str, Any]:
    return {
        "name": child.name,
        "pid": child.pid,
        "ready": child.ready,
        "uptime_s": round((now_ns - child.started_ns) / 1e9, 1),
        "deaths": slots.deaths(child.name),
        "missing": list(child.missing),
    }
