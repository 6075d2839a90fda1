"""Robots of ``openpi-client``: ``python -m bench.robots.load PACKAGES URL ROBOTS SECONDS [CONNECT]``.

Each robot asks again as soon as it has its actions. With CONNECT (seconds) another one connects as often meanwhile. It prints
one JSON object: ``ms``, the time of each observation, ``connect_ms``, from connecting to the metadata, and the first ``actions``.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import warnings

import numpy as np

if __name__ == "__main__":
    packages, url, robots, seconds, *connect = sys.argv[1:]
    sys.path.append(packages)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    until = [float("inf")]
    times: list[float] = []
    first: list[list[float]] = [[] for _ in range(int(robots))]
    together = threading.Barrier(int(robots) + 1)

    def ask(number: int) -> None:
        """Asks until the time is over."""
        policy = WebsocketClientPolicy(url)
        observation = {
            "image": np.full((96, 96, 3), number, np.uint8),
            "state": np.linspace(-1, 1, 32, dtype=np.float32) * (number + 1),
        }
        first[number] = policy.infer(observation)["actions"].ravel().tolist()
        together.wait()
        while (begun := time.perf_counter()) < until[0]:
            policy.infer(observation)
            times.append(1e3 * (time.perf_counter() - begun))
        policy._ws.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(int(robots))]
    for thread in threads:
        thread.start()
    together.wait()
    until[0] = time.perf_counter() + float(seconds)
    connects: list[float] = []
    while connect and time.perf_counter() < until[0]:
        begun = time.perf_counter()
        policy = WebsocketClientPolicy(url)
        connects.append(1e3 * (time.perf_counter() - begun))
        policy._ws.close()
        time.sleep(float(connect[0]))
    for thread in threads:
        thread.join()
    print(json.dumps({"ms": times, "connect_ms": connects, "actions": first}))
