"""Clients whose worker is killed: ``python -m tests.faults.lane_survivors CLIENTS_SOCKET COUNT FIRST SEED``.

Each is a thread with a connection of its own, and everything that it sends is made of one byte, which no other client sends:
small and large tensors, in records, in slots and in memory of the connection, answers with a place and answers that are held,
several requests at once, in batches with other clients'. It compares every byte that it gets.

Each line of standard input is a question: has each client been answered anew since the last line, twice, and is what it can read,
its own memory and all of its workers', made of its own byte? The answer is a line: ``right``, or what was wrong. If the question
is ``rest``, clients then give back the answers that they hold, and ask nothing until the next line; so what the process holds
does not depend on how far each has come.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any

import numpy as np
from tensord_client.lane import Call, LaneConnection

import tests.client  # noqa: F401  (finds tensord_client)

#: Answers that a client holds at most, and seconds that it waits for one.
_HELD, _PATIENCE = 8, 240.0
#: Seconds that it is idle at most between two rounds, so that it does not take the time of workers that start.
_PAUSE = 0.03
#: Times that a client is to be answered between two lines.
_ROUNDS = 2
#: The byte of the first client: from here on four of one are a finite float, and none is the zero of fresh memory.
_FIRST_BYTE = 0x20


class Survivor:
    """A client that asks all the time, until something is wrong."""

    def __init__(self, path: str, number: int, seed: int) -> None:
        self.byte = _FIRST_BYTE + number
        self._chance = random.Random(seed)
        self._connection = LaneConnection(path, patience=_PATIENCE)
        self._held: deque[Any] = deque(maxlen=_HELD)
        self.rounds = 0
        self.wrong = ""
        #: Held while it asks; who waits for that clears ``_may_ask`` first, as the lock is fair to nobody.
        self._asking = threading.Lock()
        self._may_ask = threading.Event()
        self._may_ask.set()
        threading.Thread(target=self._run, daemon=True).start()

    def _filled(self, array: Any) -> Any:
        array.view(np.uint8)[...] = self.byte
        return array

    def _run(self) -> None:
        try:
            lying, place = (self._filled(self._connection.empty((2, 16), np.float32)) for _ in range(2))
            prepared = self._connection.prepare(Call("rows", {"x": lying}, places={"y": place}))
            while self._may_ask.wait():
                with self._asking:
                    place[...] = 0
                    self._check(prepared(_PATIENCE)["y"])
                    self._ask_at_once()
                self.rounds += 1
                time.sleep(self._chance.random() * _PAUSE)
        except BaseException:
            self.wrong = f"client {self.byte}: {traceback.format_exc()}"

    def _ask_at_once(self) -> None:
        asked = []
        for _ in range(self._chance.randrange(1, 5)):
            if self._chance.random() < 0.5:
                rows = self._filled(np.empty((self._chance.randrange(1, 5), 16), np.float32))
                asked.append((rows.shape, self._connection.ask(Call("rows", {"x": rows}))))
                continue
            shape = (self._chance.choice([1, 100, 5000, 20_000]),)
            made = self._connection.empty if self._chance.random() < 0.5 else np.empty
            given = self._filled(made(shape, np.float32))
            asked.append((shape, self._connection.ask(Call("identity", {"INPUT0": given}))))
        for shape, pending in asked:
            (output,) = pending.result(_PATIENCE).values()
            assert output.shape == shape
            self._check(output)
            self._held.append(output)

    def _check(self, output: Any) -> None:
        found = output.reshape(-1).view(np.uint8)
        assert (found == self.byte).all(), f"among {found.size} bytes are {set(found.tolist())}, not {self.byte} alone"

    def rest(self) -> None:
        """Gives back the answers that it holds. Nothing is asked until ``go_on``."""
        self._may_ask.clear()
        with self._asking:
            self._held.clear()

    def go_on(self) -> None:
        self._may_ask.set()

    def look(self) -> str:
        """Returns what it can read and may not; "": nothing. No request of it is in flight meanwhile."""
        self._may_ask.clear()
        try:
            with self._asking:
                return self._strange() or self.wrong
        finally:
            self._may_ask.set()

    def _strange(self) -> str:
        readable = [(lane, segment._bytes) for lane in self._lanes() for segment in lane.answers.segments.values()]
        readable += [("its own", segment._bytes) for segment in list(self._connection.memory.segments.values())]
        for where, content in readable:
            known = (content == 0) | (content == self.byte)
            if not known.all():
                return f"client {self.byte} reads {set(content[~known].tolist())} in memory of {where}"
        return ""

    def _lanes(self) -> list[Any]:
        return [lane for lane in list(self._connection._lanes.values()) if lane.usable]


def waited(survivors: list[Survivor]) -> str:
    """Waits until each was answered anew. Returns what was wrong; "": nothing."""
    before = [survivor.rounds for survivor in survivors]
    limit = time.monotonic() + _PATIENCE
    for survivor, rounds in zip(survivors, before, strict=True):
        while survivor.rounds < rounds + _ROUNDS and not survivor.wrong:
            if time.monotonic() > limit:
                return f"client {survivor.byte} was not answered any more"
            time.sleep(0.001)
    return next(filter(None, [survivor.look() for survivor in survivors]), "")


def main(path: str, count: int, first: int, seed: int) -> None:
    chance = random.Random(seed)
    survivors = [Survivor(path, first + number, chance.randrange(1 << 30)) for number in range(count)]
    allocator = ctypes.CDLL(None)
    for question in sys.stdin:
        for survivor in survivors:
            survivor.go_on()
        wrong = waited(survivors)
        if question == "rest\n":
            for survivor in survivors:
                survivor.rest()
            gc.collect()
            allocator.malloc_trim(0)
        print(repr(wrong) if wrong else "right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
