"""Runs clients of lanes and kills them: ``python -m tests.faults.lane_caller CLIENTS_SOCKET``.

Each line of standard input is a command:

    COUNT SEED    starts so many clients, a few at a time, and kills them at any moment: a third while they connect, the others
                  while they call

Each client is forked off, has a connection of its own and asks in every way that leaves something in flight or held: small and
large tensors, in records and in segments, answers that are held, several at once. Each command is answered by a line: ``killed``,
or what was wrong before.
"""

from __future__ import annotations

import math
import os
import random
import select
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
#: Clients that there are at the same time, and the most seconds until one is killed.
_AT_ONCE, _LONGEST = 4, 0.03


def live(path: str, seed: int, tell: int) -> None:
    """Sends requests for ever; writes a byte to ``tell`` with each round of answers. Raises AssertionError: one was wrong."""
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


class Victim:
    """A client process that was forked off, and when it is to be killed."""

    def __init__(self, path: str, chance: random.Random) -> None:
        seed, self._calls, self._delay = chance.randrange(1 << 30), chance.random() < 2 / 3, chance.random() * _LONGEST
        self.reading, tell = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            status = 1
            try:
                os.close(self.reading)
                live(path, seed, tell)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(tell)
        #: When that is; infinite: so long after its first answer.
        self.due = math.inf if self._calls else time.monotonic() + self._delay

    def answered(self) -> None:
        """Sets the time of the kill, once the client has its first answer or has ended by itself."""
        self.due = time.monotonic() + self._delay

    def kill(self) -> str:
        """Kills the client. Returns an error if it has ended by itself, with its exit status, else ""."""
        os.close(self.reading)
        os.kill(self._pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return "" if status == -signal.SIGKILL else f"ended by itself with {status}"


def killed(path: str, count: int, chance: random.Random) -> str:
    """Runs clients and kills them. Returns the line to print."""
    victims: list[Victim] = []
    wrong: list[str] = []
    while victims or (count and not wrong):
        while count and len(victims) < _AT_ONCE and not wrong:
            victims.append(Victim(path, chance))
            count -= 1
        due = min([victim.due for victim in victims])
        waits = {victim.reading: victim for victim in victims if victim.due == math.inf}
        timeout = None if due == math.inf else max(0.0, due - time.monotonic())
        for reading in select.select(list(waits), [], [], timeout)[0]:
            waits[reading].answered()
        for victim in [victim for victim in victims if victim.due <= time.monotonic()]:
            victims.remove(victim)
            wrong += filter(None, [victim.kill()])
    return "; ".join(wrong) or "killed"


def main(path: str) -> None:
    for line in sys.stdin:
        count, seed = map(int, line.split())
        print(killed(path, count, random.Random(seed)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
