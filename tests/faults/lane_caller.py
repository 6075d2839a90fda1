"""Clients that are killed: ``python -m tests.faults.lane_caller CLIENTS_SOCKET``, told what to do by lines of standard input.

    connecting MICROSECONDS SEED   a client begins, and is killed so long after that
    calling MICROSECONDS SEED      the same, after its first answer

Each client is forked off, has a connection of its own and asks in every way that leaves something in flight or held: small and
large tensors, in records and in segments, answers that are held, several at once. Each kill is answered by a line: ``killed``,
or what was wrong before.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from typing import Any

import numpy as np
from tensord_client.lane import Call, LaneConnection

import tests.client  # noqa: F401  (finds tensord_client)

#: Answers that a client holds at most.
_HELD = 16


def live(path: str, seed: int, tell: int) -> None:
    """Asks for ever; writes a byte to ``tell`` with each round of answers. Raises AssertionError: one was wrong."""
    chance = random.Random(seed)
    connection = LaneConnection(path)
    lying = connection.empty((1, 16), np.float32)
    places = {name: connection.empty((1, 16), np.float32) for name in ("OUTPUT0", "OUTPUT1")}
    ones = np.ones((1, 16), np.float32)
    prepared = connection.prepare(Call("addsub", {"INPUT0": lying, "INPUT1": ones}, places=places))
    held: deque[Any] = deque(maxlen=_HELD)
    while True:
        value = float(chance.randrange(1000))
        lying[:] = value
        assert (prepared(60)["OUTPUT0"] == value + 1).all()
        asked = []
        for _ in range(chance.randrange(1, 9)):
            size = chance.choice([1, 100, 5000, 100_000])
            given = np.full(size, value, np.float32)
            if chance.random() < 0.5:
                given = connection.empty((size,), np.float32)
                given[:] = value
            asked.append((size, connection.ask(Call("identity", {"INPUT0": given}))))
        for size, pending in asked:
            if chance.random() < 0.1:
                pending.cancel()
                continue
            output = pending.result(60)["OUTPUT0"]
            assert output.shape == (size,)
            assert (output == value).all()
            held.append(output)
        os.write(tell, b".")


def killed(path: str, after: str, delay: float, seed: int) -> str:
    """Runs one client and kills it. Returns what to say of it."""
    reading, tell = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reading)
            live(path, seed, tell)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(tell)
    try:
        # End of file: it has ended by itself, which the exit status says.
        if after == "calling":
            os.read(reading, 1)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    finally:
        os.close(reading)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "killed" if status == -signal.SIGKILL else f"ended by itself with {status}"


def main(path: str) -> None:
    for line in sys.stdin:
        after, microseconds, seed = line.split()
        print(killed(path, after, int(microseconds) / 1e6, int(seed)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
