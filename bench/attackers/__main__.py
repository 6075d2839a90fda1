"""Runs one attack in a process of its own and prints its counts: ``python -m bench.attackers NAME HTTP GRPC SECONDS [CLIENTS]``.

CLIENTS is the path of the daemon's socket for clients, which attacks on lanes need.
"""

from __future__ import annotations

import json
import sys

from bench.attackers.catalogue import ATTACKS
from bench.attackers.target import Target
from bench.helper import leaves_blocks

if __name__ == "__main__":
    if len(sys.argv) not in (5, 6) or sys.argv[1] not in ATTACKS:
        sys.exit(f"{__doc__}\nNAME: {', '.join(ATTACKS)}")
    name, http, grpc, seconds, *clients = sys.argv[1:]
    target = Target(http, grpc, float(seconds), *clients)
    with leaves_blocks():
        ATTACKS[name](target)
    print(json.dumps(target.counts))
