"""Measures requests with a system region beside one process that runs the same jitted function on the mapped memory.

The bare program runs in a process of its own, as the worker does, and its rounds alternate with the server's.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.http as httpclient

from bench.helper import object_name
from bench.server import copied

BYTE_SIZE = 16 << 20
_WARM = 5
#: Input and output in one object, mapped, as in the server; one median (us) for each line on standard input.
BARE = """
import sys, time, statistics
import jax, numpy as np
size, seconds = int(sys.argv[2]), float(sys.argv[3])
memory = np.memmap(sys.argv[1], np.float32, "r+", shape=(2, size // 4))
identity = jax.jit(lambda x: x * 1.0).lower(jax.ShapeDtypeStruct((size // 4,), np.float32)).compile()
for _ in sys.stdin:
    lasted, end = [], time.perf_counter() + seconds
    while len(lasted) <= 5 or time.perf_counter() < end:
        began = time.perf_counter()
        np.copyto(memory[1], np.asarray(identity(memory[0])))
        lasted.append(time.perf_counter() - began)
    print(1e6 * statistics.median(lasted[5:]), flush=True)
"""


def check_access(address: str, access: str) -> None:
    """Sends a tensor through a region and checks how many bytes the server copied: none, or with ``snapshot`` input and output.

    A request before it is not counted, because the worker learns from it how outputs are allocated.

    Raises SystemExit: the server does not use regions in the way that is to be measured.
    """
    with _object() as path:
        with _registered(path, address) as (client, given, wanted):
            client.infer("identity", [given], outputs=[wanted])
            before = copied(address, "identity")
            client.infer("identity", [given], outputs=[wanted])
        found, expected = copied(address, "identity") - before, BYTE_SIZE * 2 if access == "snapshot" else 0
    if found != expected:
        raise SystemExit(f"regions are not {access}: {found} bytes were copied for a request, {expected} are expected")
    print(f"{'regions':22} {access}: {found >> 20} MiB copied for a request with {BYTE_SIZE >> 20} MiB in and out")


def report(address: str, seconds: float, rounds: int) -> None:
    """Measures both and prints a line with the medians, and the median of the rounds' ratios."""
    with _object() as path:
        pairs = _measure(path, address, seconds, rounds)
    ours, least = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{'16MiB-http-shm-c1':22} p50 {ours:8.0f} us   one process {least:8.0f} us   ratio {ratio:.2f}")


@contextlib.contextmanager
def _object() -> Iterator[Path]:
    """Creates a shared memory file with random input, followed by room for the output; yields its path."""
    path = Path("/dev/shm", object_name())
    try:
        path.write_bytes(np.random.default_rng(0).random(BYTE_SIZE // 4, np.float32).tobytes() + bytes(BYTE_SIZE))
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _registered(
    path: Path, address: str
) -> Iterator[tuple[httpclient.InferenceServerClient, httpclient.InferInput, httpclient.InferRequestedOutput]]:
    """Yields a client that has registered the file, with tritonclient's input and output for it.

    Raises SystemExit: at the end of the block the output is not the input.
    """
    name = path.name
    given = httpclient.InferInput("INPUT0", [BYTE_SIZE // 4], "FP32")
    wanted = httpclient.InferRequestedOutput("OUTPUT0")
    given.set_shared_memory(name, BYTE_SIZE)
    wanted.set_shared_memory(name, BYTE_SIZE, offset=BYTE_SIZE)
    with httpclient.InferenceServerClient(address) as client:
        client.register_system_shared_memory(name, "/" + name, 2 * BYTE_SIZE)
        yield client, given, wanted
        client.unregister_system_shared_memory(name)
    content = path.read_bytes()
    if content[:BYTE_SIZE] != content[BYTE_SIZE:]:
        raise SystemExit(f"{name}: a wrong answer")


def _measure(path: Path, address: str, seconds: float, rounds: int) -> list[tuple[float, float]]:
    """Returns both median latencies in microseconds for each round. Raises SystemExit: a wrong answer."""
    command = [sys.executable, "-c", BARE, str(path), str(BYTE_SIZE), str(seconds)]
    pairs = []
    with (
        _registered(path, address) as (client, given, wanted),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as bare,
    ):
        assert bare.stdin is not None
        assert bare.stdout is not None
        for _ in range(rounds):
            ours = _median_us(client, given, wanted, seconds)
            bare.stdin.write("\n")
            pairs.append((ours, json.loads(bare.stdout.readline())))
    return pairs


def _median_us(
    client: httpclient.InferenceServerClient,
    given: httpclient.InferInput,
    wanted: httpclient.InferRequestedOutput,
    seconds: float,
) -> float:
    lasted: list[float] = []
    end = time.perf_counter() + seconds
    while len(lasted) <= _WARM or time.perf_counter() < end:
        began = time.perf_counter()
        client.infer("identity", [given], outputs=[wanted])
        lasted.append(time.perf_counter() - began)
    return 1e6 * statistics.median(lasted[_WARM:])
