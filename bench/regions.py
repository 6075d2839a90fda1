"""Sends a tensor through a system region, and checks how a server uses it, so that no run measures another way than it says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tritonclient.http as httpclient
from tritonclient.utils import shared_memory

from bench.helper import object_name
from bench.server import copied

BYTE_SIZE = 16 << 20


@contextlib.contextmanager
def placed(client: Any, given: Any, wanted: Any, values: np.ndarray) -> Iterator[Callable[[], np.ndarray]]:
    """Puts an input's values into a region that is registered within the block, and its output behind them.

    Yields a function that returns the output's values.
    """
    name, byte_size = object_name(), values.nbytes
    given.set_shared_memory(name, byte_size)
    wanted.set_shared_memory(name, byte_size, offset=byte_size)
    region = shared_memory.create_shared_memory_region(name, f"/{name}", 2 * byte_size)
    try:
        # Its pages have to be there when it is registered, or they are not page-locked.
        shared_memory.set_shared_memory_region(region, [values, np.zeros_like(values)])
        client.register_system_shared_memory(name, f"/{name}", 2 * byte_size)
        yield lambda: shared_memory.get_contents_as_numpy(region, values.dtype, [len(values)], byte_size)
        client.unregister_system_shared_memory(name)
    finally:
        shared_memory.destroy_shared_memory_region(region)


def check_access(address: str, access: str) -> None:
    """Sends a tensor through a region and checks how many bytes the server copied: none, or with ``snapshot`` input and output.

    A request before it is not counted, because the worker learns from it how outputs are allocated.

    Raises SystemExit: the server does not use regions in the way that is to be measured, or answers wrongly.
    """
    values = np.random.default_rng(0).random(BYTE_SIZE // 4, np.float32)
    given, wanted = httpclient.InferInput("INPUT0", [len(values)], "FP32"), httpclient.InferRequestedOutput("OUTPUT0")
    with httpclient.InferenceServerClient(address) as client, placed(client, given, wanted, values) as read:
        client.infer("identity", [given], outputs=[wanted])
        before = copied(address, "identity")
        client.infer("identity", [given], outputs=[wanted])
        found, expected = copied(address, "identity") - before, BYTE_SIZE * 2 if access == "snapshot" else 0
        if not np.array_equal(read(), values):
            raise SystemExit("a region has a wrong answer")
    if found != expected:
        raise SystemExit(f"regions are not {access}: {found} bytes were copied for a request, {expected} are expected")
    print(f"{'regions':22} {access}: {found >> 20} MiB copied for a request with {BYTE_SIZE >> 20} MiB in and out")
