"""Measures what one request costs each process of the daemon: processor time in user and kernel mode, and how often it slept.

Latencies swing with whatever else a machine does; these figures swing less, because they count work instead of waiting.
"""

from __future__ import annotations

from bench import closed_loop
from bench.server import Usage, answered, children


def report(supervisor: int, address: str, seconds: float) -> int:
    """Loads the daemon with each row and prints a line for each of its processes."""
    print(f"{'row':20} {'process':12} {'user us':>9} {'kernel us':>9} {'sleeps':>9}   a request")
    for row in closed_loop.rows():
        processes = children(supervisor)
        closed_loop.measure(address, row, 0.3)
        before, count = {pid: Usage.of(pid) for pid in processes}, answered(address)
        closed_loop.measure(address, row, seconds)
        after, count = {pid: Usage.of(pid) for pid in processes}, answered(address) - count
        for pid, name in processes.items():
            used = after[pid].since(before[pid])
            print(
                f"{row.name:20} {name:12} {used.user_us / count:9.1f} {used.kernel_us / count:9.1f} {used.sleeps / count:9.2f}",
                flush=True,
            )
    return 0
