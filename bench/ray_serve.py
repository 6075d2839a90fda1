"""Measures deploy/ray beside a plain Ray Serve deployment: ``python -m bench.ray_serve [--rounds N] [--seconds S]``.

    own      16 threads of an actor on the node that serves: the application's lane, beside the plain deployment's handle
    another  the same from a node without a replica: HTTP, beside the handle

Both serve one function. The target is 5 times the plain deployment's rate on its own node, and 2 times from another. Nodes are
those of Ray's local cluster, so there is no network between them. Every answer is compared. Exit status 1: one was wrong.
It needs Ray: pip install 'tensord[test-ray]'.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_THREADS, _WIDTH = 16, 1024
_DEPLOY = Path(__file__).parents[1] / "deploy" / "ray"
_MODEL = f"""
import numpy as np

inputs = {{"x": "FP32[{_WIDTH}]"}}
outputs = {{"y": "FP32[{_WIDTH}]"}}
max_batch_size = {_THREADS}

def create(path, config, device):
    return (lambda params, inputs: {{"y": params["w"] * inputs["x"] + 1}}), {{"w": np.full({_WIDTH}, 3, np.float32)}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.ray_serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    # Workers of Ray import the application.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_DEPLOY), os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sys.path.insert(0, str(_DEPLOY))
    with tempfile.TemporaryDirectory() as models:
        folder = Path(models) / "affine" / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(_MODEL)
        rows = _measured(models, arguments.rounds, arguments.seconds)
    print("| caller | tensord, requests/s | plain Ray Serve, requests/s | times |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _measured(models: str, rounds: int, seconds: float) -> list[tuple[str, ...]]:
    """Starts a cluster with both deployments, measures them in turn and returns the rows of the table."""
    import ray
    import tensord_ray
    from ray import serve
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 200 << 20})
    serving = cluster.add_node(num_cpus=4, resources={"serving": 4}, object_store_memory=200 << 20)
    another = cluster.add_node(num_cpus=4, object_store_memory=200 << 20)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    node = {"num_cpus": 1, "resources": {"serving": 1}}
    configuration = {"repository": {"paths": [models]}, "workers": {"device": "cpu"}}
    application = tensord_ray.application({"nodes": 1, "node": node, "configuration": configuration})
    serve.run(application, name="tensord", route_prefix=None)
    plain = serve.deployment(max_ongoing_requests=4 * _THREADS, ray_actor_options=node)(Plain)
    serve.run(plain.bind(), name="plain", route_prefix=None)
    rows = []
    try:
        for name, place in (("on its own node", serving), ("on another node", another)):
            caller = (
                ray.remote(Caller)
                .options(num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False))
                .remote()
            )
            rates: dict[str, list[float]] = {"fleet": [], "plain": []}
            for _ in range(rounds):
                for way, found in rates.items():
                    found.append(ray.get(caller.rate.remote(way, seconds)))
            ours, theirs = (statistics.median(found) for found in rates.values())
            rows.append((name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.1f}"))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    return rows


class Plain:
    """A Ray Serve deployment of the same function without tensord."""

    def __init__(self) -> None:
        import jax
        import numpy as np

        w = np.full(_WIDTH, 3, np.float32)
        self._apply = jax.jit(lambda x: w * x + 1)
        np.asarray(self._apply(np.zeros((1, _WIDTH), np.float32)))

    def __call__(self, x: Any) -> Any:
        import numpy as np

        return np.asarray(self._apply(x))


class Caller:
    """An actor whose threads ask one of the deployments."""

    def __init__(self) -> None:
        import numpy as np
        import tensord_ray
        from ray import serve

        self._x = np.ones((1, _WIDTH), np.float32)
        model = tensord_ray.Fleet().model("affine")
        plain = serve.get_app_handle("plain")
        self._ways: dict[str, Callable[[], Any]] = {
            "fleet": lambda: model({"x": self._x})["y"],
            "plain": lambda: plain.remote(self._x).result(),
        }

    def rate(self, way: str, seconds: float) -> float:
        """Returns answers a second, after one second that does not count. Raises AssertionError: an answer is wrong."""
        ask, counts, wrong = self._ways[way], [0] * _THREADS, []
        begin = time.monotonic() + 1.0

        def run(row: int) -> None:
            while (now := time.monotonic()) < begin + seconds:
                try:
                    if float(ask()[0, -1]) != 4.0:
                        wrong.append(f"{way}: a wrong answer")
                except Exception as error:
                    wrong.append(f"{way}: {error}")
                    return
                counts[row] += now >= begin

        threads = [threading.Thread(target=run, args=(row,)) for row in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[0]
        return sum(counts) / seconds


if __name__ == "__main__":
    main()
