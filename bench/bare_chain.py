"""Serves a model with the processes that tensord has and without any checks, to show what the checks cost.

    python -m bench.bare_chain PORT UPSTREAM MODEL {front|process|chain}      PORT 0: any free port, which is printed

    front     answers a request that it has seen before with the answer it gave before
    process   ... after running the model itself, in the same process, for all requests that wait together
    chain     ... after having a second process run it, over a socket pair, as tensord does

Only one MODEL of ``bench/models`` is served, to clients that send binary tensors of its shapes with the same head again and
again. Every other request is passed on to UPSTREAM, a tensord with the same models, and so is the first request with each head,
whose answer is compared with what was computed here. What is answered here is added to the statistics of UPSTREAM before they
are passed on, because perf_analyzer wants to see them grow.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from tensord.workers.devices.device import DeviceName
from tensord.workers.imports.model_imports import ModelImports

_MODELS = Path(__file__).parent / "models"
#: Of each model: the shapes of one request's inputs, and the elements of its outputs.
_INPUTS = {"addsub": {"INPUT0": (1, 16), "INPUT1": (1, 16)}, "mlp": {"x": (1, 784)}}
_OUTPUTS = {"addsub": {"OUTPUT0": 16, "OUTPUT1": 16}, "mlp": {"logits": 10}}
#: So many requests run together, the rest of the rows being anything.
_LENGTHS = (1, 2, 4, 8, 16, 32)
#: A connection's number, before its inputs and before its outputs.
_NUMBER = 4
_MAX_DATAGRAM = 1 << 17


class Function:
    """Holds the model's compiled function, run over several requests at once.

    A request has ``input_byte_size`` bytes of inputs and ``output_byte_size`` bytes of outputs.
    """

    def __init__(self, model: str) -> None:
        name = DeviceName("cpu", 0)
        name.prepare_environment()
        import jax

        version = _MODELS / model / "1"
        module = ModelImports.of_version(model, [version]).run(version / "model.py")
        apply, self._parameters = module.create(_MODELS / model, {}, name.open())
        shapes = _INPUTS[model]
        self._outputs = list(_OUTPUTS[model])
        self.input_byte_size = sum(4 * int(np.prod(shape)) for shape in shapes.values())
        self.output_byte_size = 4 * sum(_OUTPUTS[model].values())
        self._compiled: dict[int, tuple[Any, dict[str, np.ndarray[Any, Any]]]] = {}
        for length in _LENGTHS:
            arguments = {name: np.zeros((length, *shape[1:]), np.float32) for name, shape in shapes.items()}
            self._compiled[length] = jax.jit(apply).lower(self._parameters, arguments).compile(), arguments
            self.run([bytes(self.input_byte_size)] * length)

    def run(self, requests: Sequence[bytes | memoryview]) -> list[bytes]:
        """Runs requests and returns the bytes of the outputs of each."""
        answers = []
        for first in range(0, len(requests), _LENGTHS[-1]):
            some = requests[first : first + _LENGTHS[-1]]
            call, arguments = self._compiled[next(length for length in _LENGTHS if length >= len(some))]
            for row, request in enumerate(some):
                at = 0
                for array in arguments.values():
                    size = array[row].nbytes
                    array[row] = np.frombuffer(request, np.float32, size // 4, at)
                    at += size
            made = call(self._parameters, arguments)
            rows = [np.asarray(made[name]) for name in self._outputs]
            answers += [b"".join([array[row].tobytes() for array in rows]) for row in range(len(some))]
        return answers


def _work(sock: socket.socket, function: Function) -> None:
    """Runs the second process: reads datagrams with requests from the socket and sends their outputs back."""
    size = _NUMBER + function.input_byte_size
    while datagram := sock.recv(_MAX_DATAGRAM):
        records = [datagram[at : at + size] for at in range(0, len(datagram), size)]
        answers = function.run([record[_NUMBER:] for record in records])
        sock.send(b"".join([record[:_NUMBER] + answer for record, answer in zip(records, answers, strict=True)]))


class Chain:
    """Holds the state that all connections share: the function, the second process's socket, the requests that wait."""

    def __init__(self, upstream: str, model: str, kind: str) -> None:
        self.upstream = upstream
        self.function = Function(model)
        self.kind = kind
        self.answered = 0
        self._connections: dict[bytes, Connection] = {}
        self._waiting: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        if kind == "chain":
            self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            command = [sys.executable, "-m", "bench.bare_chain", str(theirs.fileno()), "", model, "worker"]
            # It ends when this end of the pair is closed.
            subprocess.Popen(command, pass_fds=[theirs.fileno()])
            theirs.close()
            self._sock.setblocking(False)
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def join(self, connection: Connection) -> bytes:
        """Registers a connection and returns its number as bytes."""
        number = len(self._connections).to_bytes(_NUMBER, "little")
        self._connections[number] = connection
        return number

    def ask(self, connection: Connection, inputs: bytes) -> None:
        """Queues a request, to be answered with all others that arrive in the same iteration of the event loop."""
        if self.kind == "front":
            self._answer(connection, connection.last)
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(connection.number + inputs)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self.kind == "chain":
            self._sock.send(b"".join(waiting))
            return
        for record, outputs in zip(waiting, self.function.run([one[_NUMBER:] for one in waiting]), strict=True):
            self._answer(self._connections[record[:_NUMBER]], outputs)

    def _readable(self) -> None:
        datagram = self._sock.recv(_MAX_DATAGRAM)
        size = _NUMBER + self.function.output_byte_size
        for at in range(0, len(datagram), size):
            self._answer(self._connections[datagram[at : at + _NUMBER]], datagram[at + _NUMBER : at + size])

    def _answer(self, connection: Connection, outputs: bytes) -> None:
        self.answered += 1
        connection.transport.write(connection.answer_head + outputs)


class Connection(asyncio.Protocol):
    """Serves one client, which sends one request at a time."""

    transport: asyncio.Transport

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self.number = chain.join(self)
        self._received = b""
        #: The head that was answered last, the head of its answer, and its outputs.
        self._head: bytes | None = None
        self.answer_head = self.last = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # As tensord does: a write goes to the socket at once.
        transport.set_write_buffer_limits(high=0)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        size = self._chain.function.input_byte_size
        if self._received:
            data, self._received = self._received + data, b""
        if self._head is not None and len(data) == len(self._head) + size and data.startswith(self._head):
            self._chain.ask(self, data[-size:])
            return
        head, found, body = data.partition(b"\r\n\r\n")
        if found and len(body) >= int(_raw(head, "content-length") or 0):
            self._forward(data, head, body)
        else:
            self._received = data

    def _forward(self, request: bytes, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        length = _raw(head, "inference-header-content-length").decode()
        fields = {"inference-header-content-length": length} if length else {}
        status, kept, content = fetch(self._chain.upstream, method, path, body, fields)
        if path.endswith("/stats"):
            content = _counted(content, self._chain.answered)
        answer_head = head_of(status, kept, len(content))
        function = self._chain.function
        if path.endswith("/infer") and status == 200:
            (outputs,) = function.run([body[-function.input_byte_size :]])
            theirs, computed = (np.frombuffer(one[-len(outputs) :], np.float32) for one in (content, outputs))
            # In another batch sums are rounded otherwise; perf_analyzer sends any bits as FP32.
            if not np.allclose(theirs, computed, rtol=1e-3, atol=1e-3, equal_nan=True):
                raise SystemExit(f"{computed} is computed here, tensord answers {theirs}")
            self._head, self.last = request[: -function.input_byte_size], outputs
            self.answer_head = answer_head + content[: -len(outputs)]
        self.transport.write(answer_head + content)


def fetch(
    upstream: str, method: str, path: str, body: bytes, fields: Mapping[str, str]
) -> tuple[int, list[str], bytes]:
    """Sends an HTTP request to a server; returns its status, its header fields without the length, and its body."""
    connection = http.client.HTTPConnection(upstream)
    connection.request(method, path, body, fields)
    answer = connection.getresponse()
    content = answer.read()
    kept = [f"{name}: {value}" for name, value in answer.getheaders() if name.lower() != "content-length"]
    connection.close()
    return answer.status, kept, content


def head_of(status: int, fields: Sequence[str], size: int) -> bytes:
    """Formats the head of an HTTP answer with a body of ``size`` bytes."""
    return "\r\n".join([f"HTTP/1.1 {status} OK", *fields, f"content-length: {size}", "", ""]).encode()


def _raw(head: bytes, name: str) -> bytes:
    lines = [line.partition(b":") for line in head.split(b"\r\n")]
    return next((value.strip() for key, _, value in lines if key.lower() == name.encode()), b"")


def counters(statistics: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each counter in the statistics that grows with every request: the object that has it, and its name there."""
    for model in statistics["model_stats"]:
        for name in ("inference_count", "execution_count", "last_inference"):
            yield model, name
        for name in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            yield model["inference_stats"][name], "count"


def _counted(content: bytes, count: int) -> bytes:
    """Returns the statistics with ``count`` added to their counters, as if the upstream had answered these requests as well."""
    statistics = json.loads(content)
    for where, name in counters(statistics):
        where[name] += count
    return json.dumps(statistics).encode()


async def _serve(port: int, make: Callable[[], Chain]) -> None:
    chain = make()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(chain), "127.0.0.1", port)
    print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    _port, _upstream, _model, _kind = sys.argv[1:]
    if _kind == "worker":
        _work(socket.socket(fileno=int(_port)), Function(_model))
    else:
        uvloop.run(_serve(int(_port), lambda: Chain(_upstream, _model, _kind)))
