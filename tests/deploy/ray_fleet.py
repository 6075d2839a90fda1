"""Runs a cluster of two nodes on this host with the application of deploy/ray, for test_ray.py.

It prints a JSON object a line for each thing that it has seen. Arguments: a folder of models.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import tensord_ray
from ray import serve
from ray.cluster_utils import Cluster

ONES = {"x": np.ones((1, 4), np.float32)}
PATIENCE = 240.0


def say(what: str, **seen: Any) -> None:
    print(json.dumps({"what": what, **seen}), flush=True)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"no {what}")
        time.sleep(0.1)


class Load:
    """Asks all the time from a few threads, and keeps the answers and errors."""

    def __init__(self, fleet: tensord_ray.Fleet, threads: int = 4) -> None:
        self.answers: list[float] = []
        self.errors: list[str] = []
        self._ended = False
        self._model = fleet.model("scale")
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._ended:
            try:
                with self._model(ONES) as answer:
                    self.answers.append(float(answer["y"][0, 0]))
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    def end(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()


@ray.remote(num_cpus=0.1)
class Caller:
    """An actor that calls the fleet from a node that the test chooses."""

    def __init__(self) -> None:
        self.fleet = tensord_ray.Fleet()

    def place(self) -> dict[str, str]:
        return dict(self.fleet._daemons.where.remote().result())

    def ask(self) -> tuple[float, str]:
        value = float(self.fleet.model("scale")(ONES)["y"][0, 0])
        with self.fleet.client() as client:
            return value, repr(client)

    def begin(self) -> None:
        self.load = Load(self.fleet)

    def end(self) -> tuple[int, list[str], list[float]]:
        self.load.end()
        return len(self.load.answers), self.load.errors, sorted(set(self.load.answers))


def caller(node: str) -> Any:
    where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return Caller.options(scheduling_strategy=where).remote()


def arguments(models: str, nodes: int, **more: Any) -> dict[str, Any]:
    configuration = {
        "repository": {"paths": [models]},
        "workers": {"device": "cpu", "pin": False, "idle_timeout": PATIENCE},
        "arenas": {"byte_size": 1 << 20},
        "http": {"min_rate": 0, "processes": 1},
    }
    return {"nodes": nodes, "node": {"num_cpus": 1}, "configuration": {**configuration, **more}}


def daemons() -> dict[str, int]:
    """Returns the supervisors on this host that replicas have started: the configuration's folder -> process id."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode().split("\0")
        except OSError:
            continue
        if (
            "-c" not in words
            and "--config" in words
            and "/tensord-ray-" in (path := words[words.index("--config") + 1])
        ):
            found[os.path.dirname(path)] = int(pid)
    return found


def main() -> None:
    models = sys.argv[1]
    # The head has no daemon: who calls from there reaches one over HTTP.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 << 20})
    workers = [cluster.add_node(num_cpus=4, object_store_memory=100 << 20) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    serve.run(tensord_ray.application(arguments(models, 2)), name="tensord", route_prefix=None)
    nodes = [worker.node_id for worker in workers]
    callers = {node: caller(node) for node in nodes}

    def asked() -> list[list[Any]]:
        return [list(each) for each in ray.get([each.ask.remote() for each in callers.values()])]

    places = {node: ray.get(each.place.remote()) for node, each in callers.items()}
    say("placed", own=[places[node]["node"] == node for node in nodes], daemons=len(daemons()))
    fleet = tensord_ray.Fleet()
    value = float(fleet.model("scale")(ONES)["y"][0, 0])
    with fleet.client() as client:
        say("asked", near=asked(), far=[value, repr(client)])

    number = fleet.push("scale", {"factor": np.float32(10)}, version=7)
    say("pushed", number=number, near=asked())
    for what, tree, version in (("older", {"factor": np.float32(11)}, 7), ("unfit", {"other": np.float32(11)}, 8)):
        try:
            fleet.push("scale", tree, version=version)
        except Exception as error:
            say(what, error=str(error).strip().splitlines()[-1])

    before = set(daemons())
    load = Load(fleet)
    ray.get([each.begin.remote() for each in callers.values()])
    serve.run(tensord_ray.application(arguments(models, 2, log={"verbose": 1})), name="tensord", route_prefix=None)
    wait_until(lambda: not before & set(daemons()) and len(daemons()) == 2, "daemons in the place of those before")
    count = len(load.answers)
    wait_until(lambda: len(load.answers) > count + 100, "answers of the new daemons")
    near = ray.get([each.end.remote() for each in callers.values()])
    load.end()
    values = sorted({*load.answers, *near[0][2], *near[1][2]})
    say(
        "rolled",
        answers=[len(load.answers), *(each[0] for each in near)],
        errors=load.errors + near[0][1] + near[1][1],
        values=values,
    )
    # Who asked another node meanwhile comes back to its own.
    wait_until(lambda: all("<LaneConnection" in client for _, client in asked()), "lanes to the new daemons")
    say("as before", near=asked())

    load = Load(fleet)
    ray.get([each.begin.remote() for each in callers.values()])
    wait_until(lambda: len(load.answers) > 50, "load")
    assert fleet._way is not None
    gone = fleet._way.place
    os.kill(daemons()[gone["folder"]], signal.SIGKILL)
    cluster.remove_node(workers[nodes.index(gone["node"])], allow_graceful=False)
    count = len(load.answers)
    wait_until(lambda: len(load.answers) > count + 200, "answers after a node was killed")
    load.end()
    (stays,) = [each for node, each in callers.items() if node != gone["node"]]
    near_count, near_errors, _ = ray.get(stays.end.remote())
    say("killed", errors=load.errors, near=[near_count, near_errors], values=sorted(set(load.answers)))
    wait_until(lambda: gone["folder"] not in daemons(), "end of the daemon whose node was killed")

    serve.shutdown()
    wait_until(lambda: not daemons(), "end of the daemons")
    ray.shutdown()
    cluster.shutdown()
    say("done")


if __name__ == "__main__":
    main()
