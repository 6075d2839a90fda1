"""Describes the daemon's models, fronts and workers, for the log, for the service manager and for tensorctl."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tensord.daemon.models.changes import Models
from tensord.daemon.processes.child import Child, WorkerProcess
from tensord.daemon.processes.fronts import Fronts
from tensord.daemon.processes.process_slots import ProcessSlots
from tensord.shm import device_names
from tensord.shm.common.derivatives import original
from tensord.shm.errors import InvalidArgument
from tensord.shm.status_page import model_key

#: The most names that are listed.
_MAX_NAMED = 8


class ServedModels:
    """Produces log lines about which models are served."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._ready = False
        #: Every model that should be served, and whether it is, as last logged.
        self._logged: dict[str, bool] = {}

    def change(self) -> str:
        """Returns a log line about which models are served or missing since the last call, or "" if nothing has changed.

        A model that is being loaded for the first time is mentioned only once it is served or has failed.
        """
        standings, ready = self._models.standings(), self._models.readiness.ready
        now = {
            model.name: bool(model.served)
            for model in standings
            if model.served or model.name in self._logged or not model.loads
        }
        logged, self._logged = self._logged, now
        before, self._ready = self._ready, ready
        news = [
            ("served now", [name for name, served in now.items() if served and not logged.get(name)]),
            ("not served now", [name for name, served in now.items() if not served and logged.get(name, True)]),
            ("gone", [name for name in logged if name not in now]),
        ]
        said = [f"{what}: {_listed(names)}" for what, names in news if names]
        if not said and ready == before:
            return ""
        count = f"{sum(bool(model.served) for model in standings)} of {len(standings)} models are served"
        why = "the server is draining, " if self._models.readiness.draining else ""
        return "; ".join([f"{'ready' if ready else 'not ready'}: {why}{count}", *said])


def summary(models: Models, devices: Iterable[str]) -> str:
    """Describes the models on ``devices`` in a line, which begins with "ready" or "not ready"."""
    # A version whose worker has died is READY as well, until another worker has it.
    books = models.lifecycle.models
    found = {
        name: [n for n in numbers if books[name].versions[n].ready]
        for name, numbers in models.lifecycle.ready_models().items()
    }
    served = {name: numbers for name, numbers in found.items() if numbers}
    named = [f"{name} {'+'.join(map(str, versions))}" for name, versions in served.items()]
    listed = _listed(named) or "none"
    ready, missing = "ready" if models.readiness.ready else "not ready", models.readiness.sentence()
    line = f"{ready}: {len(served)} models ({listed}) on {', '.join(devices) or 'no worker'}"
    return f"{line}; {missing}" if missing else line


def _listed(names: list[str]) -> str:
    more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return ", ".join([*names[:_MAX_NAMED], *more])


def of_models(models: Models) -> dict[str, Any]:
    """Returns whether the daemon is ready, how many models are served, and which are not, as values for JSON.

    Each model that is not served, or of which a version is not served, is listed with the reason.
    """
    readiness = models.readiness
    return {
        "ready": readiness.ready,
        "outdated": readiness.outdated,
        "models": {"wanted": readiness.wanted, "served": readiness.wanted - readiness.unserved},
        "not_served": [
            {"name": model.name, "served": list(model.served), "reason": model.reason}
            for model in models.standings()
            if model.reason
        ],
    }


def of_model(
    models: Models,
    name: str,
    index: Iterable[Mapping[str, Any]],
    workers: Mapping[int, str],
    slow: Mapping[str, Mapping[int, Mapping[str, int]]],
) -> bytes:
    """Returns the versions of one model as JSON, each with its index entry, workers, folder, metadata and configuration.

    Args:
      index: the repository index, which has an entry for each version of each model.
      workers: the name of each worker, by the number of the worker process.
      slow: the reasons why requests were answered by slower Python code instead of C code, each with the number of requests,
      by worker name and by version.
    Raises InvalidArgument if there is no such model.
    """
    entries = [entry for entry in index if entry["name"] == name]
    if not entries:
        raise InvalidArgument(f"there is no model '{name}'")
    known, model = models.lifecycle.models, original(name)[0]
    versions = known[model].versions if model in known else {}
    found = []
    for entry in entries:
        number = int(entry.get("version") or 0)
        row: dict[str, Any] = {"version": "", "state": "UNKNOWN", **entry, "metadata": None, "config": None}
        if version := versions.get(number):
            record = version.state_record()
            row["folder"] = version.load.version_path
            row["workers"] = [workers[worker] for worker in record.workers if worker in workers]
            row["not_in_c"] = {worker: why[number] for worker, why in slow.items() if why.get(number)}
            described = next((each for each in record.derivatives if each.name == name), record)
            if described.config:
                row |= {"metadata": msgspec.Raw(described.metadata), "config": msgspec.Raw(described.config)}
        found.append(row)
    return msgspec.json.encode(found)


# ---------------------------------------------------------------------------------------------------- processes


def of_fronts(fronts: Fronts, slots: ProcessSlots, now_ns: int) -> list[dict[str, Any]]:
    """Returns a description of each front process, with the number of its client connections.

    ``slots``: knows how often each front has died. ``now_ns``: the time of CLOCK_MONOTONIC.
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
      slots: knows how often each worker has died.
      models: the versions that workers may serve, by model.
      lanes: how many lanes clients have to a worker, by the name of the worker.
      now_ns: the time of CLOCK_MONOTONIC.
    """
    names = {model_key(name, version): (name, version) for name, versions in models.items() for version in versions}
    return [
        _entry(worker, slots, now_ns)
        | {
            "device": device_names.shared(worker.device),
            "lanes": lanes.get(worker.name, 0),
            "state": _state(worker),
            "outputs": worker.page.outputs.name.lower() if worker.page else "unknown",
            "oldest_execution": _oldest_execution(worker, names, now_ns),
            "oldest_load": None if worker.oldest_load is None else _since(*worker.oldest_load, now_ns),
        }
        | _own(worker)
        | _cores(worker.pid)
        for worker in workers
    ]


def _state(worker: WorkerProcess) -> str:
    """Describes what a worker is doing, such as ``executing, loading digits``."""
    state = worker.page.state[0].name.lower() if worker.page else "starting"
    loading = worker.describe_load()
    return loading if loading and state == "idle" else f"{state}, {loading}" if loading else state


def _own(worker: WorkerProcess) -> dict[str, Any]:
    """Returns {} if models share the worker. Otherwise returns {"isolated": MODEL}, and on a GPU "memory_fraction" as well."""
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
