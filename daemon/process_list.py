"""The daemon's processes as ``tensorctl status`` shows them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

from config import core_list
from daemon.child import Child, Worker
from daemon.fronts import Fronts
from daemon.posts import Posts


def of_fronts(fronts: Fronts, posts: Posts, now_ns: int) -> list[dict[str, Any]]:
    """One entry a front, with the connections it has."""
    return [
        _entry(front, posts, now_ns) | {"connections": fronts.connections(front)} | _cores(front.pid)
        for front in fronts
    ]


def of_workers(workers: Iterable[Worker], posts: Posts, now_ns: int) -> list[dict[str, Any]]:
    """One entry a worker, with its device and what its status page says."""
    return [
        _entry(worker, posts, now_ns)
        | {"device": worker.device, "state": worker.page.state[0].name.lower() if worker.page else "starting"}
        | _cores(worker.pid)
        for worker in workers
    ]


def _cores(pid: int) -> dict[str, Any]:
    """What the kernel says: the cores that its threads may use, those that its loop may use, and how many threads there are.

    The loop's is the main thread, whose number is the process's.
    """
    cores: set[int] = set()
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                cores |= os.sched_getaffinity(int(thread))
        loop = core_list.describe(os.sched_getaffinity(pid))
        return {"cores": core_list.describe(cores), "loop": loop, "threads": len(threads)}
    return {}  # the process has just ended


def _entry(child: Child, posts: Posts, now_ns: int) -> dict[str, Any]:
    return {
        "name": child.name,
        "pid": child.pid,
        "ready": child.ready,
        "uptime_s": round((now_ns - child.started_ns) / 1e9, 1),
        "deaths": posts.deaths(child.name),
    }
