"""Runs several attacks of the benchmark at the same time, each in a process of its own that is forked off this one.

``python -m tests.faults.attackers_together HTTP GRPC SECONDS CLIENTS NAME...``. It prints one JSON array: what each counted. The
imports, which take longer than such an attack, are done once.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from bench.attackers import robots
from bench.attackers.catalogue import ATTACKS
from bench.attackers.target import Target
from bench.helper import leaves_blocks


def counted(http: str, grpc: str, seconds: str, clients: str, name: str) -> dict[str, int]:
    """Attacks a daemon, and returns what was counted."""
    target = Target(http, grpc, float(seconds), clients)
    with leaves_blocks():
        (ATTACKS | robots.ATTACKS)[name](target)
    return target.counts


if __name__ == "__main__":
    where, names = sys.argv[1:5], sys.argv[5:]
    with ProcessPoolExecutor(len(names), multiprocessing.get_context("fork")) as together:
        print(json.dumps(list(together.map(partial(counted, *where), names))))
