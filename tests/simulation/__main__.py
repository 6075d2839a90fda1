"""Runs the daemon under seeds, and tells the story of the first that fails; CONTRIBUTING.md says how to read it."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.simulation.run import shrunk, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--steps", type=int, default=3000, help="steps of a run (3000)")
    parser.add_argument("--runs", type=int, default=1, help="how many seeds, one after the other (1)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begins no further run after that")
    parser.add_argument("--story", action="store_true", help="tells the story also where nothing is wrong")
    parser.add_argument("--whole", action="store_true", help="tells the whole story of a failure, with all its events")
    arguments = parser.parse_args()
    began, turns, runs, counts = time.perf_counter(), 0, 0, Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        outcome = simulate(seed, arguments.steps)
        turns, runs, counts = turns + outcome.turns, runs + 1, counts + outcome.counts
        if outcome.fault:
            print(
                f"seed {seed} fails after {turns} steps in {runs} runs, with {len(outcome.events)} events: {outcome.fault}"
            )
            if not arguments.whole:
                outcome = shrunk(outcome, arguments.steps)
                print(f"with {len(outcome.events)} of them as well:")
            print(outcome)
            return 1
        if arguments.story:
            print(outcome)
        if time.perf_counter() - began > arguments.seconds:
            break
    took = time.perf_counter() - began
    print(
        f"{turns} steps in {runs} runs, {took:.1f} s ({turns / took:.0f} a second), the last seed {seed}; what happened:"
    )
    print(", ".join(f"{name}: {count}" for name, count in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
