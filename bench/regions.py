"""What a system region costs beside the least it could: the same jitted function on a mapped array, its result copied out.

The bare program runs in a process of its own, as the worker does, and its rounds alternate with the server's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import tritonclient.http as httpclient

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


def report(address: str, seconds: float, rounds: int) -> None:
    """One line: both medians, and the median of the rounds' ratios."""
    path = Path("/dev/shm", f"tensord-bench-{uuid.uuid4().hex}")
    try:
        pairs = _measure(path, address, seconds, rounds)
    finally:
        path.unlink(missing_ok=True)
    ours, least = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{'16MiB-http-shm-c1':22} p50 {ours:8.0f} us   one process {least:8.0f} us   ratio {ratio:.2f}")


def _measure(path: Path, address: str, seconds: float, rounds: int) -> list[tuple[float, float]]:
    """Both medians of each round. Raises SystemExit: a wrong answer."""
    name = path.name
    values = np.random.default_rng(0).random(BYTE_SIZE // 4, np.float32)
    path.write_bytes(values.tobytes() + bytes(BYTE_SIZE))
    given = httpclient.InferInput("INPUT0", list(values.shape), "FP32")
    wanted = httpclient.InferRequestedOutput("OUTPUT0")
    given.set_shared_memory(name, BYTE_SIZE)
    wanted.set_shared_memory(name, BYTE_SIZE, offset=BYTE_SIZE)
    command = [sys.executable, "-c", BARE, str(path), str(BYTE_SIZE), str(seconds)]
    pairs = []
    with (
        httpclient.InferenceServerClient(address) as client,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as bare,
    ):
        assert bare.stdin is not None
        assert bare.stdout is not None
        client.register_system_shared_memory(name, "/" + name, 2 * BYTE_SIZE)
        for _ in range(rounds):
            ours = _median_us(client, given, wanted, seconds)
            bare.stdin.write("\n")
            pairs.append((ours, json.loads(bare.stdout.readline())))
        if not np.array_equal(np.fromfile(path, np.float32, len(values), offset=BYTE_SIZE), values):
            raise SystemExit(f"{name}: a wrong answer")
        client.unregister_system_shared_memory(name)
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
