"""Runs one stock client, which sends requests for some seconds and checks the answers; prints one line of JSON.

    python -m bench.gpu.client HOST:PORT http|grpc body|system|cuda BYTES SECONDS

It prints "ready" when its first request was answered rightly, and begins to measure with the next line of its input. The tensors
lie in the body or in a region; input and output of the model ``identity`` have so many bytes each.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.helper import leaves_blocks, object_name
from bench.regions import placed

_PATIENCE = 120.0


def main(url: str, protocol: str, way: str, byte_size: int, seconds: float) -> None:
    """Sends requests as the command line says, and prints the figures."""
    if protocol == "http":
        import tritonclient.http as library

        options = {"network_timeout": _PATIENCE, "connection_timeout": _PATIENCE}
    else:
        import tritonclient.grpc as library

        options = {}
    values = np.random.default_rng().random(byte_size // 4, np.float32)
    with leaves_blocks(), library.InferenceServerClient(url, **options) as client:
        given = library.InferInput("INPUT0", [len(values)], "FP32")
        wanted = library.InferRequestedOutput("OUTPUT0")
        with _placed(way, client, given, wanted, values) as read:

            def ask() -> Any:
                return client.infer("identity", [given], outputs=[wanted])

            def check(answer: Any) -> None:
                if not np.array_equal(read(answer), values):
                    raise SystemExit("a wrong answer")

            check(ask())
            print("ready", flush=True)
            sys.stdin.readline()
            answer, found = _asked(ask, seconds)
            if answer is not None:
                check(answer)
        print(json.dumps(found), flush=True)


@contextlib.contextmanager
def _placed(way: str, client: Any, given: Any, wanted: Any, values: Any) -> Iterator[Callable[[Any], Any]]:
    """Puts the input into the body or a region; yields a function that returns the output of an answer."""
    if way == "body":
        given.set_data_from_numpy(values)
        yield lambda answer: answer.as_numpy("OUTPUT0")
    elif way == "system":
        with placed(client, given, wanted, values) as read:
            yield lambda _: read()
    else:
        import tritonclient.utils.cuda_shared_memory as cuda

        name, byte_size = object_name(), values.nbytes
        given.set_shared_memory(name, byte_size)
        wanted.set_shared_memory(name, byte_size, offset=byte_size)
        region = cuda.create_shared_memory_region(name, 2 * byte_size, 0)
        cuda.set_shared_memory_region(region, [np.concatenate([values, np.zeros_like(values)])])
        client.register_cuda_shared_memory(name, cuda.get_raw_handle(region), 0, 2 * byte_size)
        yield lambda _: cuda.get_contents_as_numpy(region, np.float32, [2 * len(values)])[len(values) :]
        client.unregister_cuda_shared_memory(name)
        cuda.destroy_shared_memory_region(region)


def _asked(ask: Callable[[], Any], seconds: float) -> tuple[Any, dict[str, Any]]:
    """Asks for some seconds. Returns the last answer, and the figures."""
    answer, lasted, errors = None, list[float](), list[str]()
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = time.perf_counter()
        try:
            answer = ask()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error)[:200]}")
        else:
            lasted.append(1e6 * (time.perf_counter() - began))
    found: dict[str, Any] = {"answers": len(lasted), "errors": len(errors), "first_errors": errors[:3]}
    if lasted:
        p50, p99, longest = (round(float(us), 1) for us in np.percentile(lasted, (50, 99, 100)))
        found |= {"rate": round(1e6 / np.mean(lasted), 1), "p50_us": p50, "p99_us": p99, "longest_ms": longest / 1e3}
    return answer, found


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5]))
