from __future__ import annotations

import os

from bench.wake_ups import round_trips


def test_each_round_trip_is_timed_and_nothing_is_left_behind() -> None:
    cores = os.sched_getaffinity(0)
    core = min(cores)
    took = round_trips(core, core, 50)
    assert len(took) == 50
    assert min(took) > 0
    assert os.sched_getaffinity(0) == cores
