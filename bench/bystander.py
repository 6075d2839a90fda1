"""Runs an ordinary client beside other load: ``python -m bench.bystander http|grpc|lane ADDRESS small|mixed``.

ADDRESS: HOST:PORT, or for a lane the daemon's socket for clients. ``small``: small tensors of changing shapes and values, with a
pause between the requests. ``mixed``, not over a lane: also tensors of 256 KiB, too large to travel in a record; one in a
registered region; over HTTP JSON with an id and a trace header of its own; and models that do not exist.
It asks with a stock client (tritonclient, or ours over a lane), which is opened anew every fifty requests, and compares each
answer, until its standard input ends. It prints a line when it has asked once, and at its end one JSON object: ``answers``, how
many were right; ``failures``, by error message; ``worst_ms`` and ``median_ms``, the times from asking to the answer, with the
time to connect.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
import select
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from geventhttpclient.response import HTTPParseError
from tritonclient.utils import InferenceServerException

from bench.helper import helper, leaves_blocks, line, object_name, reports

_REQUESTS_A_CONNECTION = 50
#: A daemon that says nothing for so long has lost the request.
_PATIENCE = 120.0
#: How the message of a failure begins that came because the connection was lost.
LOST = "connection lost"
_LOST_IN_GRPC = re.compile("Socket closed|onnection re(set|fused)|Broken pipe|failed to connect|recvmsg|GOAWAY")
#: A client that waits a little between its requests does not fill a processor by itself.
_PAUSE = 0.002


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked, and the right answer."""

    model: str
    inputs: Mapping[str, np.ndarray]
    #: Empty: an error is the right answer.
    outputs: Mapping[str, np.ndarray]
    #: The name of the region that the input lies in; "": it is in the request.
    region: str = ""
    in_json: bool = False


def small() -> Iterator[Asked]:
    """Yields requests with small tensors, each of another shape and with other values, without end."""
    numbers = np.random.default_rng()
    while True:
        # Integers, which every text format writes without loss.
        a, b = numbers.integers(0, 1 << 16, (2, int(numbers.integers(1, 17)), 16)).astype(np.float32)
        yield Asked("addsub", {"INPUT0": a, "INPUT1": b}, {"OUTPUT0": a + b, "OUTPUT1": a - b})


def mixed(region: str, values: np.ndarray) -> Iterator[Asked]:
    """Yields requests of all kinds without end. ``region``: a registered region that begins with ``values``, FP32[N]."""
    for usual in small():
        kind = random.random()
        if kind < 0.02:
            yield Asked(f"missing-{random.randrange(10)}", {"INPUT0": values}, {})
        elif kind < 0.07:
            large = np.random.default_rng().random((1 << 16) - random.randrange(4), np.float32)
            yield Asked("identity", {"INPUT0": large}, {"OUTPUT0": large})
        elif kind < 0.12:
            yield Asked("identity", {"INPUT0": values}, {"OUTPUT0": values}, region)
        else:
            yield replace(usual, in_json=kind < 0.32)


class _ByLibrary:
    """Asks by tritonclient, whose two libraries have the same interface."""

    def __init__(self, protocol: str, address: str) -> None:
        self._library: Any = grpcclient if protocol == "grpc" else httpclient
        # Channels of one process would share their connections.
        options: dict[str, Any] = {"channel_args": [("grpc.use_local_subchannel_pool", 1)]}
        if self._library is httpclient:
            options = {"connection_timeout": _PATIENCE, "network_timeout": _PATIENCE}
        self._client = self._library.InferenceServerClient(address, **options)
        self.close = self._client.close

    def __call__(self, asked: Asked) -> Mapping[str, np.ndarray]:
        library = self._library
        given = [library.InferInput(name, list(values.shape), "FP32") for name, values in asked.inputs.items()]
        # Only HTTP has more than one form.
        form = {"binary_data": not asked.in_json} if library is httpclient else {}
        said: dict[str, Any] = {} if library is httpclient else {"client_timeout": _PATIENCE}
        for tensor, values in zip(given, asked.inputs.values(), strict=True):
            if asked.region:
                tensor.set_shared_memory(asked.region, values.nbytes)
            else:
                tensor.set_data_from_numpy(values, **form)
        if asked.in_json:
            said["headers"] = {"traceparent": f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-01"}
            said["request_id"] = str(random.getrandbits(64))
        wanted = [library.InferRequestedOutput(name, **form) for name in asked.outputs]
        answer = self._client.infer(asked.model, given, outputs=wanted, **said)
        return {name: answer.as_numpy(name) for name in asked.outputs}


class _OnLane:
    """Asks by our own client. Its inputs lie in the client's shared memory and in the records, in turn."""

    def __init__(self, path: str) -> None:
        import tensord_client

        self._client = tensord_client.connect(path)
        self._placed = False
        self.close = self._client.close

    def __call__(self, asked: Asked) -> Mapping[str, np.ndarray]:
        inputs = dict(asked.inputs)
        if self._placed:
            inputs = {name: self._client.empty(values.shape, values.dtype) for name, values in asked.inputs.items()}
            for name, values in asked.inputs.items():
                inputs[name][...] = values
        self._placed = not self._placed
        return self._client.model(asked.model, timeout=_PATIENCE)(inputs)


class Bystander:
    """An ordinary client, which counts its answers and failures."""

    def __init__(self, protocol: str, address: str, source: Iterator[Asked]) -> None:
        self._protocol, self._address, self._source = protocol, address, source
        self._client: Any = None
        self._left = self._answers = 0
        self._failures: dict[str, int] = {}
        #: Of all requests; of long runs a sample, and the longest of them.
        self._waits_ms: deque[float] = deque(maxlen=100_000)
        self._worst_ms = 0.0

    def close(self) -> None:
        """Closes the connection."""
        if self._client is not None:
            self._client.close()
        self._client, self._left = None, 0

    def ask(self) -> None:
        """Sends one request, and notes its time and whether it failed."""
        asked, began = next(self._source), time.perf_counter()
        said = self._exchange(asked)
        if said:
            self._failures[said] = self._failures.get(said, 0) + 1
            self.close()
        else:
            self._answers += 1
        waited = 1e3 * (time.perf_counter() - began)
        self._waits_ms.append(waited)
        self._worst_ms = max(self._worst_ms, waited)

    def _exchange(self, asked: Asked) -> str:
        """Sends one request. Returns why it failed; "": the answer is the right one."""
        import tensord_client

        try:
            if not self._left:
                self.close()
                kind = _OnLane if self._protocol == "lane" else functools.partial(_ByLibrary, self._protocol)
                self._client, self._left = kind(self._address), _REQUESTS_A_CONNECTION
            self._left -= 1
            answer = self._client(asked)
        except (OSError, HTTPParseError) as error:
            return f"{LOST}: {type(error).__name__}: {error}"[:200]
        except InferenceServerException as error:
            if error.status() == "StatusCode.UNAVAILABLE" and _LOST_IN_GRPC.search(error.message()):
                return f"{LOST}: {error.message()}"[:200]
            return "" if not asked.outputs else f"{error.status()}: {error.message()}"[:200]
        except tensord_client.ServingError as error:
            return f"{type(error).__name__}: {error.message}"[:200]
        if not asked.outputs:
            return f"{asked.model} answers"
        for name, values in asked.outputs.items():
            if not np.array_equal(answer[name], values):
                return f"wrong answer: '{name}' of {asked.model} is {answer[name]}"[:200]
        return ""

    def report(self) -> dict[str, Any]:
        """Returns the counts and times that the module prints."""
        return {
            "answers": self._answers,
            "failures": self._failures,
            "worst_ms": self._worst_ms,
            "median_ms": statistics.median(self._waits_ms or [0.0]),
        }


@contextlib.contextmanager
def requests(protocol: str, address: str, kind: str) -> Iterator[Iterator[Asked]]:
    """Yields the client's requests, without end. ``kind``: "small", or "mixed", with a region that the block registers."""
    if kind != "mixed":
        yield small()
        return
    name = object_name()
    values = np.random.default_rng().random(1 << 12, np.float32)
    path = Path("/dev/shm", name)
    with (grpcclient if protocol == "grpc" else httpclient).InferenceServerClient(address) as client:
        try:
            path.write_bytes(values.tobytes())
            client.register_system_shared_memory(name, f"/{name}", values.nbytes)
            yield mixed(name, values)
            client.unregister_system_shared_memory(name)
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def bystanders(addresses: Mapping[str, str], kind: str = "small", count: int = 1) -> Iterator[dict[str, Any]]:
    """Runs ``count`` ordinary clients of each protocol, which have asked once when the block begins.

    ``addresses``: protocol -> address. Yields a dictionary that has each client's report when the block has ended: by protocol,
    with a number where a protocol has several.
    """
    seen: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        running = {
            f"{protocol} {number}" if number else protocol: stack.enter_context(
                helper("bench.bystander", protocol, address, kind)
            )
            for number in range(count)
            for protocol, address in addresses.items()
        }
        for each in running.values():
            line(each)
        yield seen
        seen.update(zip(running, reports(running.values()), strict=True))


def main(protocol: str, address: str, kind: str) -> None:
    """Sends requests until standard input ends, and prints the report."""
    with requests(protocol, address, kind) as source:
        bystander = Bystander(protocol, address, source)
        bystander.ask()
        print("begun", flush=True)
        while not select.select([sys.stdin], [], [], 0.0 if kind == "mixed" else _PAUSE)[0]:
            bystander.ask()
        bystander.close()
    print(json.dumps(bystander.report()))


if __name__ == "__main__":
    with leaves_blocks():
        main(*sys.argv[1:])
