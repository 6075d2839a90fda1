"""Clients that send steps of many sequences through fronts chosen at random, and compare every sum.

A sum that is wrong was computed from a fresh state or from another sequence's. A step may be answered with the error that the
sequence was lost with its worker, and then each further step must be, until a START begins the sequence again.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

#: The Triton Python model of tests/faults/models that sums each sequence up.
MODEL = "sums"
_PATIENCE = 300.0
#: One in so many steps is the last of its sequence, and one in so many of a lost one asks before it begins anew.
_ENDS, _ASKS = 12, 2


class Sequence:
    """A sequence with the sum that its client expects."""

    def __init__(self, who: int | str) -> None:
        self.who = who
        #: None: there is none until the next START.
        self.sum: int | None = None
        #: Its worker died, and it says so until then.
        self.lost = False


class Clients:
    """Threads that send steps of their own sequences and compare every sum, until the block ends."""

    def __init__(self, http: str, grpc: str, sequences: int, threads: int) -> None:
        self._addresses = http, grpc
        self._stop = threading.Event()
        kinds = [(str(number) if number % 3 == 0 else number) for number in range(1, sequences + 1)]
        shares = [[Sequence(who) for who in kinds[first::threads]] for first in range(threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(number, share)) for number, share in enumerate(shares)
        ]
        self._lock = threading.Lock()
        #: right, lost, and whatever must not be.
        self.seen: Counter[str] = Counter()

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_PATIENCE)
        if any(thread.is_alive() for thread in self._threads):
            self.seen["a client got no answer at all"] += 1

    @property
    def failures(self) -> dict[str, int]:
        """Returns the counts of outcomes that are errors."""
        return {what: count for what, count in self.seen.items() if what not in ("right", "lost")}

    def _run(self, seed: int, sequences: list[Sequence]) -> None:
        chance = random.Random(seed)
        with connections(*self._addresses) as fronts:
            while not self._stop.is_set():
                said = step(chance.choice(fronts), chance.choice(sequences), chance)
                with self._lock:
                    self.seen[said] += 1


Front = tuple[Any, Any]


@contextlib.contextmanager
def connections(http: str, grpc: str) -> Iterator[list[Front]]:
    """Yields tritonclient's HTTP and gRPC client, each with its module."""
    timeouts = {"network_timeout": _PATIENCE, "connection_timeout": _PATIENCE}
    with (
        contextlib.closing(httpclient.InferenceServerClient(http, **timeouts)) as over_http,
        contextlib.closing(grpcclient.InferenceServerClient(grpc)) as over_grpc,
    ):
        yield [(over_http, httpclient), (over_grpc, grpcclient)]


def step(front: Front, sequence: Sequence, chance: random.Random) -> str:
    """Sends one step of a sequence. Returns its outcome: "right", "lost", or what went wrong."""
    client, module = front
    x = chance.randrange(1, 1000)
    start = sequence.sum is None and not (sequence.lost and chance.randrange(_ASKS) == 0)
    end = chance.randrange(_ENDS) == 0
    given = module.InferInput("x", [1, 1], "INT32")
    given.set_data_from_numpy(np.full((1, 1), x, np.int32))
    try:
        answer = client.infer(MODEL, [given], sequence_id=sequence.who, sequence_start=start, sequence_end=end)
    except InferenceServerException as error:
        sequence.sum, sequence.lost = None, True
        expected = f"sequence {sequence.who} of model '{MODEL}' was lost when its worker died; start it again with the START flag"
        return "lost" if error.message() == expected else f"failed: {error.message()}".replace(str(sequence.who), "N")
    total = int(answer.as_numpy("sum").flat[0])
    if sequence.sum is None and not start:
        return "a lost sequence answered"
    right = total == (0 if start else sequence.sum or 0) + x
    sequence.sum, sequence.lost = (None if end else total), False
    return "right" if right else "a sum is wrong"
