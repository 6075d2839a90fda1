"""The cores are shared out wholly and evenly, and nobody is left without."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from tensord.config.core_list import describe
from tensord.workers.devices.device_cpu import pin, share_of_cores


@given(st.integers(1, 64), st.integers(1, 64))
def test_shares(cores: int, workers: int) -> None:
    everything = list(range(100, 100 + cores))
    shares = [share_of_cores(everything, index, workers) for index in range(workers)]
    assert all(shares)
    if workers <= cores:
        assert sorted(core for share in shares for core in share) == everything
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {core for share in shares for core in share} == set(everything)


def test_pin() -> None:
    before = os.sched_getaffinity(0)
    try:
        pin(0, 1)
        assert os.sched_getaffinity(0) == before
        pin(0, 2)
        assert os.sched_getaffinity(0) <= before
        assert len(os.sched_getaffinity(0)) <= max(1, (len(before) + 1) // 2)
    finally:
        os.sched_setaffinity(0, before)


def test_pin_to_what_is_named() -> None:
    before = os.sched_getaffinity(0)
    try:
        pin(1, 2, (describe(before), str(max(before))))
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_xla_computes_with_as_many_threads_as_it_is_told() -> None:
    """The pool's threads are counted in processes of their own, and with them the parts that a program is cut into."""
    script = (
        "import os, sys\nfrom tensord.workers.devices.device_cpu import limit_threads, thread_count\n"
        "limit_threads(int(sys.argv[1]))\n"
        "import jax, numpy as np\njax.devices()\n"
        "names = [open(f'/proc/self/task/{t}/comm').read() for t in os.listdir('/proc/self/task')]\n"
        "program = jax.jit(lambda x: x * 1.5).lower(np.zeros(1 << 22, np.float32)).compile().as_text()\n"
        "print(thread_count(), sum('XLA' in name for name in names), 'outer_dimension_partitions' in program)\n"
    )
    found = {}
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "PJRT_NPROC")}
    for threads in (0, 1, 4):
        command = [sys.executable, "-c", script, str(threads)]
        done = subprocess.run(
            command, env=environment | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=True
        )
        found[threads] = done.stdout.split()
    assert found[0][0] == str(len(os.sched_getaffinity(0)))
    assert (found[1][0], found[1][2]) == ("1", "False")
    assert found[4][0] == "4"
    assert int(found[1][1]) < int(found[4][1])
