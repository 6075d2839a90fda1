"""One attack in a process of its own: ``python -m bench.attackers NAME HTTP GRPC SECONDS``; prints what happened as JSON."""

from __future__ import annotations

import json
import sys

from bench.attackers.catalogue import ATTACKS
from bench.attackers.target import Target

if __name__ == "__main__":
    name, http, grpc, seconds = sys.argv[1:]
    target = Target(http, grpc, float(seconds))
    ATTACKS[name](target)
    print(json.dumps(target.counts))
