"""Shows which way a request takes through our code: the functions called, their files, and returns to a file already left.

    python -m bench.route                     every row, for the front, for the worker, and for both together
    python -m bench.route --files http-first  what one row went through, file by file in the order of the first calls
    python -m bench.route --map http-first    its files as a list for docs/architecture.md, each with its first sentence
    python -m bench.route --other DIR         another checkout of ours, for each of these

    http, grpc      two tensors of 64 bytes     grpc-1MiB  one of 1 MiB     python  small, for a model that C does not answer for
    step            a step of a sequence        token      one token of generate_stream

``first``: the first request of its kind, on a connection that has carried another one. ``known``: the sixth.
A daemon is started in whose processes ``bench/entered`` writes down each call while a request is under way. It counts calls of
Python functions of daemon, shm, workers, config and tensord, in all threads: in a front from the request's bytes until nothing
happens any more, in a worker from the record to the send of its answer. A comprehension counts as a part of the function around
it. A *return* is a call in a file that was entered before, and left. Each row is measured three times (first requests with three
models) and the least is shown, because now and then a timer is due at the same time.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import http.client
import json
import os
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple
from unittest import mock

import hpack
import numpy as np

from bench import grpc_frames
from bench.server import ROOT, serving
from bench.vary import grpc_requests, http_requests
from bench.vary.http_requests import Step
from tensord.daemon.grpc import frames

#: How often each row is asked for; of rows that are first ones there is a model for each time.
TIMES = 3
#: Requests before one of a known kind is counted.
_WARM = 5
#: Seconds in which everything that belongs to a request is over.
_QUIET = 0.05
#: Calls with more time than that between them belong to two tokens.
_GAP_NS = 12_000_000
#: Tokens of the row of one token; a step takes several times the gap.
_TOKENS = 12
_HOOK = Path(__file__).with_name("entered")

#: Requests of a model with a rule for its queue are never answered in C (docs/decisions/fast-path.md).
_IN_PYTHON = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 600000000 } }"
#: Each step takes some fifty times what an addition takes, so that one token is over before the next.
_TOKEN = """
    import jax
    import jax.numpy as jnp

    inputs = {"count": "INT32[1]"}
    outputs = {"token": "INT32[1]"}
    slots, max_steps, inserts_per_step = 4, 4096, 4

    def create(path, config, device):
        def init(params, slots):
            return {"at": jnp.zeros(slots, jnp.int32), "count": jnp.zeros(slots, jnp.int32), "x": jnp.zeros((4, 128, 128))}

        def insert(params, carry, slot, inputs):
            return carry | {"at": carry["at"].at[slot].set(0), "count": carry["count"].at[slot].set(inputs["count"][0])}, {}

        def step(params, carry, active):
            x = jax.lax.fori_loop(0, 200, lambda i, x: jnp.tanh(x @ x + i), carry["x"])
            at = carry["at"] + active
            carry = carry | {"at": at, "x": x}
            return carry, {"token": at[:, None]}, active & (at <= carry["count"]), active & (at >= carry["count"])

        return (init, insert, step), {}
    """


class Entered(NamedTuple):
    """One recorded event: a call of a function of ours, or a send to a socket."""

    at_ns: int
    thread: int
    kind: str
    file: str
    function: str


@dataclass(frozen=True)
class Way:
    """The calls that one process made for one request."""

    calls: Sequence[Entered]

    @property
    def files(self) -> list[str]:
        """Returns each file that was entered, once, in the order of the first calls."""
        return list(dict.fromkeys(call.file for call in self.calls))

    @property
    def visits(self) -> list[str]:
        """Returns the files in the order in which they were entered; a file that is entered again is there again."""
        files = [call.file for call in self.calls]
        return [file for file, before in zip(files, ["", *files], strict=False) if file != before]

    @property
    def figures(self) -> tuple[int, int, int]:
        """Returns how many calls and files there are, and how often a file was entered again after it had been left."""
        return len(self.calls), len(self.files), len(self.visits) - len(self.files)


@dataclass(frozen=True)
class Row:
    """A kind of request, and the calls that it made in the front and in the worker."""

    name: str
    front: Way
    worker: Way

    def line(self) -> str:
        """Formats the figures of the front, of the worker, and of both together."""
        front, worker = self.front.figures, self.worker.figures
        files = len({*self.front.files, *self.worker.files})
        both = front[0] + worker[0], files, front[2] + worker[2]
        return f"{self.name:18}" + "".join(
            "".join(f"{figure:7}" for figure in part) + "   " for part in (front, worker, both)
        )


class Recording:
    """The folder that processes write their calls to, and the file that turns recording on and off."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._row = 0
        self._tell(0)

    def _tell(self, row: int) -> None:
        # In place: whoever has the file mapped sees it.
        path = self._folder / "row"
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(bytes([row]))

    @contextlib.contextmanager
    def row(self) -> Iterator[dict[str, Way]]:
        """Records within the block. Yields a dictionary that is filled at its end: "http", "grpc", "worker" -> its calls."""
        found: dict[str, Way] = {}
        self._row = self._row % 255 + 1
        self._tell(self._row)
        try:
            yield found
            time.sleep(_QUIET)
        finally:
            self._tell(0)
        time.sleep(_QUIET)  # a write may be under way
        found.update({part: Way(self._calls(part)) for part in ("http", "grpc", "worker")})

    def _calls(self, part: str) -> list[Entered]:
        module = {"http": ".daemon.http", "grpc": ".daemon.grpc", "worker": ".workers"}[part]
        found = []
        for path in self._folder.glob("*.calls"):
            command, *lines = path.read_text().splitlines()
            if any(word.endswith(module) for word in command.split()):
                for line in lines:
                    row, at, thread, kind, file, function = line.split(" ", 5)
                    if int(row) == self._row:
                        found.append(Entered(int(at), int(thread), kind, file, function))
        return sorted(found)


def until_sent(way: Way) -> Way:
    """Returns the calls before the last send."""
    last = max([at for at, call in enumerate(way.calls) if call.kind == "send"], default=len(way.calls))
    return without_sends(Way(way.calls[:last]))


def without_sends(way: Way) -> Way:
    """Returns the calls without the sends."""
    return Way([call for call in way.calls if call.kind == "call"])


def bursts(way: Way) -> list[Way]:
    """Cuts the calls into parts wherever nothing was called for a while."""
    found: list[list[Entered]] = []
    for call in without_sends(way).calls:
        if not found or call.at_ns - found[-1][-1].at_ns > _GAP_NS:
            found.append([])
        found[-1].append(call)
    return [Way(calls) for calls in found]


def usual(ways: Sequence[Way]) -> Way:
    """Returns the first of those whose figures occur most often."""
    figures = [way.figures for way in ways]
    return ways[figures.index(statistics.mode(figures))]


def shown(rows: Sequence[Row]) -> Row:
    """Returns the row to show of several tries: of requests the one with the fewest calls, of tokens the usual."""
    name = rows[0].name
    choose = functools.partial(min, key=lambda way: way.figures) if name in ASKED else usual
    return Row(name, choose([row.front for row in rows]), choose([row.worker for row in rows]))


class Client:
    """Sends requests to a daemon that records, one at a time."""

    def __init__(self, recording: Recording, http: str, grpc: str) -> None:
        self._recording = recording
        self._http, self._grpc = (split(address) for address in (http, grpc))

    def asked(self, name: str, protocol: str, requests: Sequence[Asked]) -> Row:
        """Sends the requests on a connection that has carried another one; returns the row of the last request."""
        connect, address = (OverHttp, self._http) if protocol == "http" else (OverGrpc, self._grpc)
        with contextlib.closing(connect(address)) as ask:
            # A connection's first request costs more, whatever it says.
            for request in [small_request("other"), *requests[:-1]]:
                ask(request)
            time.sleep(_QUIET)
            with self._recording.row() as ways:
                ask(requests[-1])
        return Row(name, without_sends(ways[protocol]), until_sent(ways["worker"]))

    def tokens(self) -> list[Row]:
        """Asks for tokens by ``generate_stream``; returns a row for each token in the middle of the stream."""
        body = json.dumps({"count": _TOKENS}).encode()
        head = b"POST /v2/models/token/generate_stream HTTP/1.1\r\nHost: bench\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        with socket.create_connection(self._http) as sock, self._recording.row() as ways:
            sock.sendall(head + body)
            received = b""
            while received.count(b"data:") < _TOKENS:
                chunk = sock.recv(1 << 16)
                assert chunk, received
                received += chunk
        # The first ones are the request's, the last ones its end.
        parts = (bursts(ways[part])[3:-3] for part in ("http", "worker"))
        return [Row("token", front, worker) for front, worker in zip(*parts, strict=False)]


def split(address: str) -> tuple[str, int]:
    """Splits ``host:port`` into what a socket connects to."""
    host, _, port = address.rpartition(":")
    return host, int(port)


class Asked(NamedTuple):
    """The contents of a request."""

    model: str
    inputs: Mapping[str, np.ndarray]
    output: str
    step: Step | None = None


class OverHttp:
    """Asks on one kept connection, each request in one piece."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address)
        self.close = self._socket.close

    def __call__(self, asked: Asked) -> None:
        """Sends a request and reads its whole answer. Raises AssertionError: the request is refused."""
        self._socket.sendall(http_requests.tritonclient(asked.model, "", "", asked.inputs, (asked.output,), asked.step))
        with http.client.HTTPResponse(self._socket) as answer:
            answer.begin()
            content = answer.read()
            assert answer.status == 200, content[:300]


class OverGrpc:
    """Asks by unary calls on one connection, one after the other."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(grpc_frames.HELLO)
        self._received = self._socket.makefile("rb")
        self._stream = -1

    def __call__(self, asked: Asked) -> None:
        """Sends a request and reads its whole answer. Raises AssertionError: the request is refused."""
        self._stream += 2
        message = grpc_requests.tritonclient(asked.model, "", asked.inputs, (asked.output,), asked.step)
        self._socket.sendall(grpc_frames.call(self._stream, message))
        while True:
            high, low, kind, flags, _ = frames.read_head(self._received.read(frames.HEAD_SIZE))
            content = self._received.read(high << 16 | low)
            if kind == frames.SETTINGS and not flags & frames.ACK:
                self._socket.sendall(frames.frame(frames.SETTINGS, frames.ACK, 0))
            elif kind == frames.HEADERS and flags & frames.END_STREAM:
                said = dict(hpack.Decoder().decode(content))
                assert said["grpc-status"] == "0", said
                return

    def close(self) -> None:
        self._received.close()
        self._socket.close()


def small_request(model: str) -> Asked:
    """Returns a request with two tensors of 64 bytes."""
    a = np.arange(16, dtype=np.float32).reshape(1, 16)
    return Asked(model, {"INPUT0": a, "INPUT1": a}, "OUTPUT0")


def large_request(model: str) -> Asked:
    """Returns a request with a tensor of 1 MiB."""
    return Asked(model, {"INPUT0": np.zeros(1 << 18, np.float32)}, "OUTPUT0")


def steps(model: str, count: int) -> list[Asked]:
    """Returns the first ``count`` steps of a sequence."""
    x = np.zeros((1, 64), np.float32)
    return [Asked(model, {"x": x}, "y", Step(7, not number, False)) for number in range(count)]


def repeated(request: Asked) -> list[Asked]:
    """Returns the request so many times that the last one is of a known kind."""
    return [request] * (_WARM + 1)


def rows(client: Client, names: Sequence[str]) -> Iterator[Row]:
    """Yields the row to show for each name, as soon as it is measured."""
    for name in names:
        yield shown(asked(client, name))


def asked(client: Client, name: str) -> list[Row]:
    """Measures a row several times; returns all tries."""
    if name not in ASKED:
        return client.tokens()
    protocol, kind, request = ASKED[name]
    made = [request(f"{kind}{number}") for number in range(TIMES)]
    return [client.asked(name, protocol, requests) for requests in made]


#: Row -> protocol, whose models it asks, and the requests of which the last is shown. A first one comes before one that is known.
ASKED: dict[str, tuple[str, str, Callable[[str], list[Asked]]]] = {
    "http-first": ("http", "http", lambda model: [small_request(model)]),
    "http-known": ("http", "http", lambda model: repeated(small_request(model))),
    "grpc-first": ("grpc", "grpc", lambda model: [small_request(model)]),
    "grpc-known": ("grpc", "grpc", lambda model: repeated(small_request(model))),
    "grpc-1MiB-first": ("grpc", "large", lambda model: [large_request(model)]),
    "grpc-1MiB-known": ("grpc", "large", lambda model: repeated(large_request(model))),
    "python-first": ("http", "python", lambda model: [small_request(model)]),
    "python-known": ("http", "python", lambda model: repeated(small_request(model))),
    "step-first": ("http", "rnn", lambda model: steps(model, 1)),
    "step-known": ("http", "rnn", lambda model: steps(model, _WARM + 1)),
}
ROWS = [*ASKED, "token"]
#: Kind of model -> the one of ``bench/models`` that it is, its shape, and what its configuration has besides.
_MODELS = {
    "http": ("addsub", "1, 16", ""),
    "grpc": ("addsub", "1, 16", ""),
    "large": ("identity", str(1 << 18), ""),
    "python": ("addsub", "16", _IN_PYTHON),
    "rnn": ("rnn", "64", ""),
}


def write_models(repository: Path, names: Sequence[str]) -> None:
    """Writes the models that these rows ask: one of each kind for each try."""
    copied(repository, "other", *_MODELS["http"])
    for kind in {ASKED[name][1] for name in names if name in ASKED}:
        for number in range(TIMES):
            copied(repository, f"{kind}{number}", *_MODELS[kind])
    if "token" in names:
        (repository / "token" / "1").mkdir(parents=True)
        (repository / "token" / "1" / "model.py").write_text(dedent(_TOKEN))


def copied(repository: Path, name: str, model: str, shape: str, more: str) -> None:
    """Copies a model of ``bench/models`` under another name.

    Its shape is fixed to ``shape``, so that it is compiled when it is loaded; ``more`` is added to its configuration.
    """
    shutil.copytree(ROOT / "bench" / "models" / model, repository / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = repository / name / "config.pbtxt"
    config = re.sub(r"dims: \[.*?\]", f"dims: [ {shape} ]", path.read_text()).replace(f'"{model}"', f'"{name}"')
    path.write_text((re.sub("max_batch_size: 0", "max_batch_size: 4", config) if more else config) + more)


@contextlib.contextmanager
def recorded(tree: Path, names: Sequence[str]) -> Iterator[Client]:
    """Runs a daemon of a checkout whose processes record their calls, within the block; yields a client."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_models(Path(folder, "models"), names)
        http, grpc = (f"127.0.0.1:{port}" for port in free_ports(2))
        config = Path(folder, "serve.toml")
        config.write_text(
            f'[repository]\npaths = ["{folder}/models"]\n[http]\nport = {split(http)[1]}\n[grpc]\nport = {split(grpc)[1]}\n'
            "[metrics]\nport = 0\n[expert]\nspin_us = 0\n"
        )
        recording = Recording(Path(folder))
        python = tree / ".venv" / "bin" / "python"
        command = [
            str(python) if python.exists() else sys.executable,
            "-m",
            "tensord",
            "serve",
            "--config",
            str(config),
        ]
        variables = {
            "ROUTE_FOLDER": folder,
            "ROUTE_TREE": f"{tree}/tensord/",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_HOOK), os.environ.get("PYTHONPATH")))),
        }
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(serving(command, http, Path(folder, "log"), tree))
        yield Client(recording, http, grpc)


def free_ports(count: int) -> list[int]:
    """Returns ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def through(row: Row) -> str:
    """Formats each visit of a file with the functions called in it, for the front and for the worker."""
    told = []
    for part, way in (("front", row.front), ("worker", row.worker)):
        told.append(f"{row.name}, {part}: {', '.join(map(str, way.figures))}")
        before = ""
        seen: set[str] = set()
        for call in way.calls:
            if call.file != before:
                told.append(f"  {'back in ' if call.file in seen else ''}{call.file}")
            told.append(f"      {call.function}")
            seen.add(call.file)
            before = call.file
    return "\n".join(told)


def mapped(rows: Sequence[Row], tree: Path) -> str:
    """Formats a row's files as a section of docs/architecture.md: in the order of the first calls, each with its first sentence.

    The files are those that most of the tries enter: a timer, or the end of another connection, is no part of the row's way.
    """
    tries = [route_files(row) for row in rows]
    entered = Counter(file for files in tries for file in files)
    usually = {file for file, count in entered.items() if 2 * count > len(tries)}
    route = max(tries, key=lambda files: len(usually.intersection(files)))
    told = [f"### (`{rows[0].name}`)", ""]
    for number, file in enumerate([file for file in route if file in usually], 1):
        told.append(f"{number}. `{file}`: {first_sentence(tree / file)}")
    return "\n".join(told)


def first_sentence(file: Path) -> str:
    """Returns what a module's docstring says before its first empty line."""
    return " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0].split())


def route_files(row: Row) -> list[str]:
    """Returns the files of the front, then those that only the worker enters."""
    return list(dict.fromkeys([*row.front.files, *row.worker.files]))


#: A route in docs/architecture.md begins with a heading that ends in its row, and names a file in each item.
_ROUTE = re.compile(r"^#+ [^\n]*\(`([\w-]+)`\)\n(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^\d+\. `([^`]+)`(?:: (.*))?", re.MULTILINE)


def documented(text: str) -> dict[str, dict[str, str]]:
    """Returns the routes that a page documents: row -> its files, and what the page says of each."""
    return {name: dict(_ITEM.findall(section)) for name, section in _ROUTE.findall(text) if name in ROWS}


def main() -> None:
    """Parses the command line, starts the daemon and prints what was asked for."""
    parser = argparse.ArgumentParser(
        prog="bench.route", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="of: %(default)s")
    parser.add_argument("--files", metavar="ROW", choices=ROWS, help="what this row went through")
    parser.add_argument("--map", metavar="ROW", choices=ROWS, help="its files as a list for docs/architecture.md")
    parser.add_argument("--other", type=Path, default=ROOT, metavar="DIR", help="another checkout of ours")
    arguments = parser.parse_args()
    tree = arguments.other.resolve()
    alone = arguments.files or arguments.map
    names = [alone] if alone else arguments.rows.split(",")
    if unknown := set(names) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    with recorded(tree, names) as client:
        if alone:
            found = asked(client, alone)
            print(through(shown(found)) if arguments.files else mapped(found, tree))
            return
        print(f"{'':18}{'front':>21}   {'worker':>21}   {'both':>21}")
        print(f"{'':18}" + f"{'calls':>7}{'files':>7} returns   " * 3)
        for row in rows(client, names):
            print(row.line(), flush=True)


if __name__ == "__main__":
    main()
