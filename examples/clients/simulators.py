"""Runs simulators in processes of their own with one policy: requests sent at the same time share the model's batches.

python examples/clients/simulators.py [--url ADDRESS] [--processes N] [--steps N]           (pip install tensord-client)

The simulator is a stand-in: its state is an image, and it takes the class that the model sees as its action.
"""

import argparse
import multiprocessing
import sys
import time

import numpy as np
import tensord_client


def simulate(seed: int, url: str | None, steps: int) -> int:
    """Runs one simulator with a client of its own, as in its own process; returns the sum of its actions."""
    random = np.random.default_rng(seed)
    total = 0
    with tensord_client.connect(url) as client:
        policy = client.model("digits", timeout=60)
        state = random.random((1, 64), np.float32) * 16
        for _ in range(steps):
            action = int(policy({"image": state})["logits"].argmax())
            state = np.roll(state, action + 1)
            total += action
    return total


def main() -> int:
    """Runs all simulators. Returns 0 if the first one, run again by itself, takes the same actions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server; without it the daemon of this host is looked for")
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    told = parser.parse_args()
    began = time.monotonic()
    print(f"{told.processes} processes are started, which takes minutes on a slow machine", flush=True)
    totals = []
    with multiprocessing.get_context("spawn").Pool(told.processes) as pool:
        simulations = [pool.apply_async(simulate, (seed, told.url, told.steps)) for seed in range(told.processes)]
        for simulation in simulations:
            totals.append(simulation.get())
            if len(totals) % max(1, told.processes // 8) == 0:
                print(f"{len(totals)} of {told.processes} simulators are done", flush=True)
    took = time.monotonic() - began
    print(f"{told.processes} simulators made {told.processes * told.steps} steps in {took:.1f} s")
    return 0 if simulate(0, told.url, told.steps) == totals[0] else 1


if __name__ == "__main__":
    sys.exit(main())
