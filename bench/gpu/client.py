"""Runs one stock client, which sends requests for some seconds and checks the answers; prints one line of JSON.

    python -m bench.gpu.client '{"url": "127.0.0.1:18100", "protocol": "http", "way": "cuda", "byte_size": 65536, "seconds": 2}'

It prints "ready" when its first request was answered rightly, and begins to measure with the next line of its input. ``way``:
where the tensors lie, "body", "system" or "cuda". ``byte_size``: of the input and of the output of the model ``identity``, each.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from bench.helper import leaves_blocks, object_name

_PATIENCE = 120.0


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON object of the command line."""

    url: str
    protocol: str
    way: str
    byte_size: int
    seconds: float


def main() -> None:
    """Sends requests as the command line says, and prints the figures."""
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    if asked.protocol == "http":
        import tritonclient.http as library

        options = {"network_timeout": _PATIENCE, "connection_timeout": _PATIENCE}
    else:
        import tritonclient.grpc as library

        options = {}
    values = np.random.default_rng().random(asked.byte_size // 4, np.float32)
    with leaves_blocks(), library.InferenceServerClient(asked.url, **options) as client:
        given = library.InferInput("INPUT0", [len(values)], "FP32")
        wanted = library.InferRequestedOutput("OUTPUT0")
        with _placed(asked, client, given, wanted, values) as read:

            def ask() -> Any:
                return client.infer("identity", [given], outputs=[wanted])

            def check(answer: Any) -> None:
                if not np.array_equal(read(answer), values):
                    raise SystemExit("a wrong answer")

            check(ask())
            print("ready", flush=True)
            sys.stdin.readline()
            answer, lasted, errors = _loop(ask, asked.seconds)
            if answer is not None:
                check(answer)
        print(json.dumps(_figures(lasted, errors)), flush=True)


@contextlib.contextmanager
def _placed(asked: Asked, client: Any, given: Any, wanted: Any, values: Any) -> Iterator[Callable[[Any], Any]]:
    """Puts the input into the body or a region; yields a function that returns the output of an answer."""
    byte_size, name = asked.byte_size, object_name()
    if asked.way == "body":
        given.set_data_from_numpy(values)
        yield lambda answer: answer.as_numpy("OUTPUT0")
        return
    given.set_shared_memory(name, byte_size)
    wanted.set_shared_memory(name, byte_size, offset=byte_size)
    if asked.way == "cuda":
        import tritonclient.utils.cuda_shared_memory as cuda

        region = cuda.create_shared_memory_region(name, 2 * byte_size, 0)
        cuda.set_shared_memory_region(region, [np.concatenate([values, np.zeros_like(values)])])
        client.register_cuda_shared_memory(name, cuda.get_raw_handle(region), 0, 2 * byte_size)
        yield lambda _: cuda.get_contents_as_numpy(region, np.float32, [2 * len(values)])[len(values) :]
        client.unregister_cuda_shared_memory(name)
        cuda.destroy_shared_memory_region(region)
        return
    import tritonclient.utils.shared_memory as shm

    region = shm.create_shared_memory_region(name, f"/{name}", 2 * byte_size)
    try:
        # Its pages have to be there when it is registered, or they are not page-locked.
        shm.set_shared_memory_region(region, [values, np.zeros_like(values)])
        client.register_system_shared_memory(name, f"/{name}", 2 * byte_size)
        yield lambda _: shm.get_contents_as_numpy(region, np.float32, [len(values)], offset=byte_size)
        client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(region)


def _loop(ask: Callable[[], Any], seconds: float) -> tuple[Any, list[float], list[str]]:
    """Asks for some seconds. Returns the last answer, the seconds that each took, and the errors."""
    answer, lasted, errors = None, list[float](), list[str]()
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = time.perf_counter()
        try:
            answer = ask()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error)[:200]}")
        else:
            lasted.append(time.perf_counter() - began)
    return answer, lasted, errors


def _figures(lasted: list[float], errors: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"answers": len(lasted), "errors": len(errors), "first_errors": errors[:3]}
    if lasted:
        found["rate"] = round(len(lasted) / sum(lasted), 1)
        lasted.sort()
        for percent in (50, 99):
            found[f"p{percent}_us"] = round(1e6 * lasted[len(lasted) * percent // 100], 1)
        found["longest_ms"] = round(1e3 * lasted[-1], 1)
    return found


if __name__ == "__main__":
    main()
