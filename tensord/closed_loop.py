"""Asks a served model on several connections, each of which waits for an answer before it asks again (``tensord bench``)."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tensord.shm.arrays import DTYPES, Array, drawn

#: Sends a request and waits for its answer; returns what is called once the clock was read.
Ask = Callable[[], Callable[[], object]]


def closed_loop(ask: Ask, seconds: float) -> list[float]:
    """Sends requests one after the other for a number of seconds. Returns the seconds that each request took.

    At least one request is sent. ``ask()`` sends a request, waits for its answer, and returns a function that checks the
    answer. The time of the check is not measured.
    """
    took: list[float] = []
    at = began = time.perf_counter()
    while at < began + seconds or not took:
        compare = ask()
        took.append(time.perf_counter() - at)
        compare()
        at = time.perf_counter()
    return took


def measured(
    address: str, model: str, connections: int, seconds: float, size: int, header: Sequence[str] = ()
) -> dict[str, float]:
    """Sends requests on several connections at once. Returns answers per second and percentiles of the requests' durations.

    ``address`` is an address for ``tensord_client.connect``, or ``grpc://HOST:PORT``. "" means the default address. ``size``
    is the size of variable axes. ``header`` are header fields for each request over HTTP or gRPC, as NAME:VALUE.
    """
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(connections) as threads:
        asks = [_connected(stack, address, model, size, header) for _ in range(connections)]
        for span in (min(seconds, 0.5), seconds):  # the first one warms up
            took = list(threads.map(functools.partial(closed_loop, seconds=span), asks))
    p50, p99 = (np.percentile(np.concatenate(took), (50, 99)) * 1e6).round(1).tolist()
    rate = round(sum(len(each) / sum(each) for each in took), 1)
    return {"connections": connections, "answers_per_s": rate, "p50_us": p50, "p99_us": p99}


def _connected(stack: contextlib.ExitStack, address: str, name: str, size: int, header: Sequence[str]) -> Ask:
    import tensord_client
    from tensord_client.client import headers_of

    headers = headers_of(header)
    if address.startswith("grpc://"):
        from tritonclient import grpc

        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        client = stack.enter_context(grpc.InferenceServerClient(address[len("grpc://") :], channel_args=options))
        described = client.get_model_metadata(name, headers=headers).inputs
        given = [grpc.InferInput(each.name, (), each.datatype) for each in described]
        for each, values in zip(given, _inputs(described, size).values(), strict=True):
            each.set_shape(values.shape).set_data_from_numpy(values)
        return lambda: client.infer(name, given, headers=headers).get_response
    model = stack.enter_context(tensord_client.connect(address or None, headers=headers)).model(name)
    inputs = _inputs(model.inputs, size)
    return lambda: model(inputs).keys


def _inputs(described: Iterable[Any], size: int) -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {
        each.name: drawn(DTYPES[each.datatype], [max(n, -n * size) for n in each.shape], random) for each in described
    }
