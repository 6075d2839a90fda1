"""Runs streams of responses, some cancelled, some read slowly, while the worker is killed: ``python -m bench.streams SECONDS``.

The model is a generator, or with ``--stepped`` a stepped model that gives the same responses.

Each client sends one request after the other on gRPC streams of its own, and compares every response: they come in order and are
complete, or the request ends with one error, or the client cancels. It prints how often each of these happened, and the
descriptors and private bytes of each process over time; those of a worker are read just before it is killed, when all have the
same age. Exit status 1: a response was wrong, one was missing, or a request never ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import signal
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.footprint import Footprint, footprints
from bench.server import children, serving

_HTTP, _GRPC = "127.0.0.1:18172", "127.0.0.1:18173"
#: Where the model is: a generator, and a stepped one.
GENERATORS, STEPPED = (Path(__file__).parent / name for name in ("models", "stepped"))
_MODEL = "repeat"
#: Of one request.
_MOST = 300
#: Of requests: how many are cancelled by their clients, and how many are read slowly.
_CANCELLED, _SLOW = 0.1, 0.1
#: Each worker serves at least for so long before it is killed.
_SERVES_SECONDS = 1.0
#: How often it is seen what processes hold.
_MOMENTS = 12
#: A request that ends neither way for so long has got lost.
PATIENCE = 240.0


class StreamClient(threading.Thread):
    """A client thread that sends requests until it is stopped. ``seen``: the outcomes of its requests, counted."""

    def __init__(self, address: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._chance = random.Random(seed)
        self._stopped = threading.Event()
        self.seen: Counter[str] = Counter()

    def stop(self) -> None:
        """Stops the client after the request that it has begun."""
        self._stopped.set()

    def run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while not self._stopped.is_set():
                with contextlib.closing(_Stream(stub, self._chance)) as stream:
                    for _ in range(self._chance.randint(1, 5)):
                        outcome = stream.ask()
                        self.seen[outcome] += 1
                        if outcome != "complete":
                            break


class _Stream:
    """A call of ModelStreamInfer, for one request at a time."""

    def __init__(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, chance: random.Random) -> None:
        self._chance = chance
        self._requests: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        self._call = stub.ModelStreamInfer(iter(self._requests.get, None), timeout=PATIENCE)

    def ask(self) -> str:
        """Sends a request and reads its responses. Returns ``complete``, ``cancelled``, ``error: ...`` or ``wrong: ...``."""
        chance = self._chance
        base = np.float32(chance.randint(0, 1000)) + np.arange(16, dtype=np.float32)
        count, slow = chance.randint(0, _MOST), chance.random() < _SLOW
        leaves_at = chance.randint(0, count) if chance.random() < _CANCELLED else -1
        self._requests.put(_request(base, count))
        try:
            for number in range(count + 1):
                if number == leaves_at:
                    return "cancelled"
                if slow and not number % 50:
                    time.sleep(chance.random() / 5)
                answer = next(self._call)
                inner = answer.infer_response
                final = inner.parameters["triton_final_response"].bool_param
                if answer.error_message:
                    return f"error: {answer.error_message}"
                if final != (number == count):
                    return f"wrong: the end after {number} responses of {count}"
                if not final and inner.raw_output_contents[0] != (base + np.float32(number)).tobytes():
                    return f"wrong: response {number} of {count}"
        except grpc.RpcError as error:
            return f"error: {error.code().name}"
        return "complete"

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()


def _request(base: np.ndarray, count: int) -> service_pb2.ModelInferRequest:
    asked = service_pb2.ModelInferRequest(model_name=_MODEL)
    asked.inputs.add(name="base", datatype="FP32", shape=[16])
    asked.inputs.add(name="count", datatype="INT32", shape=[1])
    asked.raw_input_contents.extend((base.tobytes(), np.array([count], np.int32).tobytes()))
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    return asked


class Course:
    """Collects footprints of each process over time, by role."""

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor
        self._found: dict[str, list[Footprint]] = {}

    def note(self, *kinds: str) -> None:
        """Reads the footprints of the processes with these roles; with none given, of all but the workers."""
        # One of them may have ended just now.
        with contextlib.suppress(OSError):
            for kind, footprint in footprints(self._supervisor).items():
                if kind in kinds or (not kinds and kind != "workers"):
                    self._found.setdefault(kind, []).append(footprint)

    def report(self) -> list[str]:
        """Returns a line for each role.

        The first quarter is left out: caches fill, and a process's first requests are under way.
        """
        lines = []
        for kind, course in self._found.items():
            settled = course[len(course) // 4 :]
            descriptors = " ".join(str(each.descriptors) for each in settled)
            mebibytes = " ".join(f"{each.private_bytes / (1 << 20):.1f}" for each in settled)
            lines.append(f"{kind}: descriptors {descriptors}; private MiB {mebibytes}")
        return lines


def serves() -> bool:
    """Returns whether the model is ready."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{_HTTP}/v2/models/{_MODEL}/ready", timeout=5):
        return True
    return False


def told(clients: list[StreamClient]) -> Counter[str]:
    """Returns the outcomes of all clients' requests, counted."""
    return sum((client.seen for client in clients), Counter())


def main() -> int:
    """Parses the command line, runs and prints the report."""
    parser = argparse.ArgumentParser(prog="bench.streams", description=__doc__)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kill", type=float, default=5.0, help="seconds between two kills of the worker; 0: none")
    parser.add_argument("--stepped", action="store_true", help="ask a stepped model")
    parser.add_argument(
        "--log", type=Path, default=Path("/tmp/tensord-streams.log"), help="where the daemon's log goes"
    )
    arguments = parser.parse_args()
    http_port, grpc_port = (address.rpartition(":")[2] for address in (_HTTP, _GRPC))
    repository = GENERATORS if not arguments.stepped else STEPPED
    command = [sys.executable, "-m", "tensord", "serve", f"--model-repository={repository}"]
    command += ["--model-control-mode=explicit", f"--load-model={_MODEL}", "--device=cpu"]
    command += [f"--http-port={http_port}", f"--grpc-port={grpc_port}", "--allow-metrics=false"]
    with serving(command, _HTTP, arguments.log) as supervisor:
        clients = [StreamClient(_GRPC, seed) for seed in range(arguments.clients)]
        for client in clients:
            client.start()
        started = time.monotonic()
        kill_at, note_at, served_since = started + arguments.kill, started, 0.0
        course = Course(supervisor)
        while (now := time.monotonic()) < started + arguments.seconds:
            time.sleep(0.2)
            found = {kind: pid for pid, kind in children(supervisor).items()}
            if now >= note_at:
                note_at = now + arguments.seconds / _MOMENTS
                course.note()
                if not arguments.kill:
                    course.note("workers")
            if arguments.kill and now >= kill_at and "workers" in found:
                if not served_since:
                    # On a busy machine one takes its time to begin.
                    served_since = now if serves() else 0.0
                    continue
                if now < served_since + _SERVES_SECONDS:
                    continue
                kill_at, served_since = now + arguments.kill, 0.0
                course.note("workers")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found["workers"], signal.SIGKILL)
        for client in clients:
            client.stop()
        for client in clients:
            client.join(PATIENCE)
        seen = told(clients)
        hung = sum(client.is_alive() for client in clients)
    for outcome, count in seen.most_common():
        print(f"{count:8d} {outcome}")
    for line in course.report():
        print(line)
    print(f"{hung} clients hang")
    return 1 if hung or any(outcome.startswith("wrong") for outcome in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
