from __future__ import annotations

import itertools
import socket
import statistics
import threading
import time

import numpy as np
import pytest

from bench.closed_loop import Row
from bench.open_loop import Load, arrivals, measure

VALUES = np.arange(4, dtype=np.float32)
ANSWER = VALUES.tobytes()
ROW = Row("row", 1, b"x" * 64, VALUES)


def test_arrivals_are_the_same_for_every_server_and_have_the_stated_rate() -> None:
    times = arrivals(1000, 20)
    assert times == arrivals(1000, 20) == sorted(times)
    assert times[0] > 0
    assert times[-1] < 20
    assert len(times) == pytest.approx(20_000, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # Exponential gaps: the deviation is as large as the mean. Equal gaps would have none.
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)


class OneAtATime:
    """A server that answers each request of one connection after a pause, with the right answer or a given one."""

    def __init__(self, pause: float, answer: bytes = ANSWER) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.pause, self.answer = pause, answer
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            while self.receive(connection):
                time.sleep(self.pause)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.answer) + self.answer)

    def receive(self, connection: socket.socket) -> bool:
        left = len(ROW.request)
        while left and (piece := connection.recv(left)):
            left -= len(piece)
        return not left

    def close(self) -> None:
        self.listener.close()
        self.thread.join()


def test_a_slow_server_is_charged_for_those_that_waited() -> None:
    """Ten requests are due at once on one connection, each takes 20 ms: the last waited for all of them."""
    server = OneAtATime(0.02)
    try:
        load = measure(server.address, ROW, [0.0] * 10, connections=1)
    finally:
        server.close()
    assert len(load.latencies_us) == 10
    assert load.backlog == 9
    assert load.latencies_us[-1] >= 10 * 20_000
    assert load.latencies_us[0] >= 20_000
    assert load.percentile(50) >= 5 * 20_000


def test_a_wrong_answer_stops_the_measurement() -> None:
    server = OneAtATime(0, bytes(16))
    try:
        with pytest.raises(AssertionError, match="row: wrong answer"):
            measure(server.address, ROW, [0.0], connections=1)
    finally:
        server.close()


def test_percentiles_are_of_the_sorted_latencies() -> None:
    load = Load(1.0, [float(value) for value in range(100)], 0)
    assert (load.percentile(50), load.percentile(99), load.percentile(99.9)) == (50, 99, 99)
