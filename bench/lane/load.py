"""Runs one client process of a load: ``python -m bench.lane.load WAY ROW ADDRESS NUMBER``.

    WAY   lane (ADDRESS: the clients' socket), http or grpc (ADDRESS: HOST:PORT; tensors in system regions), local (no server)

It sends each of its requests and checks the answers, prints ``ready``, and waits for a line with the seconds that it is to ask;
then it prints what it measured as one JSON object, and so on until its input ends. Every answer is compared with what is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.helper import leaves_blocks, object_name
from bench.lane.rows import ROWS, Array, Row, Tensors
from tensord.closed_loop import Ask, closed_loop

#: Requests of a row that varies, which are sent in turn.
_POOL = 64
_TIMEOUT = 120.0
#: Datatypes of the protocol.
_NAMES = {"float32": "FP32", "uint8": "UINT8"}

AsyncAsk = Callable[[], Awaitable[None]]


def requests(row: Row, number: int) -> Iterator[tuple[str, Tensors, Tensors]]:
    """Yields the id, inputs and right outputs of requests without end: always the same, or those of a pool in turn."""
    chance = random.Random(number)
    many = _POOL if row.varies and row.model != "identity" else 4 if row.varies else 1
    pool = [(inputs, row.outputs(inputs)) for inputs in (row.inputs(chance) for _ in range(many))]
    asked = 0
    while True:
        asked += 1
        yield f"{number}-{asked}" if row.varies else "", *pool[asked % len(pool)]


def check(outputs: Any, right: Tensors) -> None:
    """Raises AssertionError: an output has other values than the right one, or another shape."""
    for name, values in right.items():
        found = outputs[name]
        # Of a few bytes numpy's comparison takes longer than a request.
        same = found.tobytes() == values.tobytes() if values.nbytes < 4096 else bool((found == values).all())
        if found.shape != values.shape or not same:
            raise AssertionError(f"output '{name}' is {found}, right is {values}")


class Fixed:
    """Compares outputs that are written to the same memory each time with the right ones.

    Between many processes nothing is in the processor's caches any more, and comparing by numpy takes longer than asking.
    """

    def __init__(self, found: Tensors, right: Tensors) -> None:
        self._few = {name: values.tobytes() for name, values in right.items() if values.nbytes < 4096}
        self._many = {name: values for name, values in right.items() if name not in self._few}
        self._found = found
        self._memory = {name: memoryview(values.reshape(-1).view(np.uint8)) for name, values in found.items()}

    def check(self) -> None:
        """Compares outputs, then changes a byte of each so that a stale one is noticed. Raises AssertionError: one differs."""
        for name, values in self._few.items():
            if bytes(self._memory[name]) != values:
                raise AssertionError(f"output '{name}' is {self._found[name]}")
        if self._many:
            check(self._found, self._many)
        for memory in self._memory.values():
            memory[0] ^= 1


class Region:
    """A system region for one request at a time: its inputs in a row, and behind them its outputs."""

    def __init__(self, library: Any, row: Row) -> None:
        self._library = library
        self._outputs_at, self.byte_size = row.byte_sizes[0], sum(row.byte_sizes)
        self.name = object_name()
        path = Path("/dev/shm", self.name)
        path.touch(0o600)
        os.truncate(path, self.byte_size)
        self._memory = np.memmap(path, np.uint8, "r+")
        self.close = path.unlink

    def tensors(self, inputs: Tensors, right: Tensors) -> tuple[list[Any], list[Any]]:
        """Writes a request's inputs to the region; returns tritonclient's objects for its inputs and its outputs."""
        said: tuple[list[Any], list[Any]] = [], []
        at = 0
        for name, values in inputs.items():
            self._memory[at : at + values.nbytes] = values.reshape(-1).view(np.uint8)
            said[0].append(self._library.InferInput(name, list(values.shape), _NAMES[values.dtype.name]))
            said[0][-1].set_shared_memory(self.name, values.nbytes, at)
            at += values.nbytes
        at = self._outputs_at
        for name, values in right.items():
            said[1].append(self._library.InferRequestedOutput(name))
            said[1][-1].set_shared_memory(self.name, values.nbytes, at)
            at += values.nbytes
        return said

    def outputs(self, right: Tensors) -> Fixed:
        """Returns the outputs in the region, to be compared with the right ones."""
        at, found = self._outputs_at, {}
        for name, values in right.items():
            found[name] = self._memory[at : at + values.nbytes].view(values.dtype).reshape(values.shape)
            at += values.nbytes
        return Fixed(found, right)


@contextlib.contextmanager
def over_lane(row: Row, address: str, number: int) -> Iterator[Ask]:
    """Yields a function that asks over a lane, with arrays of the client's memory, one for each input and shape.

    Where nothing varies it is a prepared call.
    """
    import tensord_client

    source = requests(row, number)
    with tensord_client.connect(address) as client:
        model = client.model(row.model, timeout=_TIMEOUT)
        kept: dict[tuple[str, tuple[int, ...]], Array] = {}

        def written(tensors: Tensors) -> Tensors:
            for name, values in tensors.items():
                if (name, values.shape) not in kept:
                    kept[name, values.shape] = client.empty(values.shape, values.dtype)
                kept[name, values.shape][...] = values
            return {name: kept[name, values.shape] for name, values in tensors.items()}

        if not row.varies:
            _, inputs, right = next(source)
            places = written(right)
            call = model.prepare(written(inputs), out=places)
            compare = Fixed(places, right).check

            def ask() -> Callable[[], None]:
                call()
                return compare

        else:

            def ask() -> Callable[[], None]:
                request_id, inputs, right = next(source)
                answer = model(written(inputs), request_id=request_id)

                def compare() -> None:
                    with answer:
                        check(answer, right)

                return compare

        yield ask


@contextlib.contextmanager
def over_library(way: str, row: Row, address: str, number: int) -> Iterator[Ask]:
    """Yields a function that asks by tritonclient with system regions; where nothing varies its objects are made once."""
    import importlib

    library = importlib.import_module(f"tritonclient.{way}")
    source = requests(row, number)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(library.InferenceServerClient(address))
        region = Region(library, row)
        stack.callback(region.close)
        client.register_system_shared_memory(region.name, f"/{region.name}", region.byte_size)
        stack.callback(client.unregister_system_shared_memory, region.name)
        _, inputs, right = next(source)
        said = region.tensors(inputs, right)
        outputs = region.outputs(right)

        def ask() -> Callable[[], None]:
            nonlocal said, outputs
            request_id = ""
            if row.varies:
                request_id, inputs, right = next(source)
                said, outputs = region.tensors(inputs, right), region.outputs(right)
            client.infer(row.model, said[0], outputs=said[1], request_id=request_id)
            return outputs.check

        yield ask


@contextlib.contextmanager
def in_process(row: Row, number: int) -> Iterator[Ask]:
    """Yields a function that calls the jitted function in this process, without a server."""
    import jax

    source, function = requests(row, number), row.jitted()
    device = jax.devices("cpu")[0]
    _, inputs, right = next(source)

    def ask() -> Callable[[], None]:
        nonlocal inputs, right
        if row.varies:
            _, inputs, right = next(source)
        with jax.default_device(device):
            outputs = {name: np.asarray(values) for name, values in function(**inputs).items()}
        return lambda: check(outputs, right)

    yield ask


@contextlib.asynccontextmanager
async def flights(way: str, row: Row, address: str, number: int) -> AsyncIterator[list[AsyncAsk]]:
    """Yields one client's functions that ask, one for each request that is to be in flight."""
    async with contextlib.AsyncExitStack() as stack:
        askers: list[AsyncAsk] = []
        if way == "lane":
            import tensord_client

            model = await (await stack.enter_async_context(await tensord_client.connect_async(address))).model(
                row.model
            )
            askers += [_lane_asker(model, requests(row, 1000 * number + each)) for each in range(row.in_flight)]
        else:
            import importlib

            library = importlib.import_module(f"tritonclient.{way}.aio")
            client = await stack.enter_async_context(library.InferenceServerClient(address))
            for each in range(row.in_flight):
                region = Region(library, row)
                stack.callback(region.close)
                await client.register_system_shared_memory(region.name, f"/{region.name}", region.byte_size)
                stack.push_async_callback(client.unregister_system_shared_memory, region.name)
                askers.append(_library_asker(client, region, row, requests(row, 1000 * number + each)))
        yield askers


def _lane_asker(model: Any, source: Iterator[tuple[str, Tensors, Tensors]]) -> AsyncAsk:
    async def ask() -> None:
        request_id, inputs, right = next(source)
        check(await model(inputs, request_id=request_id), right)

    return ask


def _library_asker(client: Any, region: Region, row: Row, source: Iterator[tuple[str, Tensors, Tensors]]) -> AsyncAsk:
    async def ask() -> None:
        request_id, inputs, right = next(source)
        given, wanted = region.tensors(inputs, right)
        await client.infer(row.model, given, outputs=wanted, request_id=request_id)
        region.outputs(right).check()

    return ask


def report(took: list[float], began: float, used: float) -> None:
    """Prints the figures of one measurement as JSON."""
    seconds, used = time.perf_counter() - began, time.process_time() - used
    figures = {"answers": len(took), "seconds": seconds, "p50_us": 1e6 * statistics.median(took)}
    print(json.dumps(figures | {"client_us": 1e6 * used / len(took)}), flush=True)


def run(ask: Ask) -> None:
    """Asks some times to warm up; then measures for as many seconds as each line of standard input says."""
    for _ in range(_POOL):
        ask()()
    print("ready", flush=True)
    for line in sys.stdin:
        used, began = time.process_time(), time.perf_counter()
        report(closed_loop(ask, float(line)), began, used)


async def run_flights(way: str, row: Row, address: str, number: int) -> None:
    """Does what ``run`` does, with many requests in flight on one client."""
    async with flights(way, row, address, number) as askers:
        for _ in range(_POOL):
            await asyncio.gather(*[ask() for ask in askers])
        print("ready", flush=True)
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            took: list[float] = []
            used, began = time.process_time(), time.perf_counter()
            until = began + float(line)

            async def asks(ask: AsyncAsk, took: list[float] = took, until: float = until) -> None:
                while True:
                    at = time.perf_counter()
                    await ask()
                    took.append(time.perf_counter() - at)
                    if time.perf_counter() >= until:
                        return

            await asyncio.gather(*map(asks, askers))
            report(took, began, used)


def main(way: str, name: str, address: str, number: int) -> None:
    """Runs one client process of the load."""
    row = ROWS[name]
    if row.in_flight > 1:
        asyncio.run(run_flights(way, row, address, number))
        return
    if way == "lane":
        opened = over_lane(row, address, number)
    elif way == "local":
        opened = in_process(row, number)
    else:
        opened = over_library(way, row, address, number)
    with opened as ask:
        run(ask)


if __name__ == "__main__":
    with leaves_blocks():
        main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
