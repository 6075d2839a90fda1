"""Measures pushing new parameters into a running model: ``python -m bench.parameters [--rounds N] [--rows ROW,...]``.

push      100 MiB pushed from a region and as a tree, beside ``jax.device_put`` of the same tree in this process (target: at most
          3 times its time), and beside a reload of the model from its files (at least 20 times faster). In turn in each round.
          The model has one leaf, and its program is trivial.
network   like push, with a transformer of twelve layers, whose parameters of 97 MiB are 99 leaves.
while     the p99 of a small HTTP request on four connections while the same model's 1 MiB is pushed ten times a second, beside
          the p99 when nothing is pushed (at most 1.5 times).
sets      1000 sets of 1 MiB with room for 100 on the device: the rate of requests whose set is on the device beside the rate
          with ``main`` (at least 0.97), ten of each in turn, each on a connection of its own; and how much longer a request takes
          whose set is not, beside a copy of 1 MiB to the device (at most 2), from memory that was last read as long ago: ten
          requests of either kind and ten copies in turn, because the machine may be slower a second later. The sets are pushed so
          that a processor has to copy them, too, which would otherwise use them in place. A first request for a set is measured
          separately.
mixed     a model with ``batch_sets``, a base of 64 MiB and adapters of 128 KiB: requests of 16 sets at once from one event loop,
          which share a call (how many calls there were is printed), beside as many of which each is sent when the one before it
          is answered, to a model without a queue delay (at least 6 times faster), and as many at once to that
          model: the first runs by itself, and others join those that come meanwhile. XLA sets the bound: the same function is
          measured without a server, in this process, in 16 calls with one row and one with 16.
narrow    like mixed, with a base of 1 MiB and adapters of 16 KiB, whose product takes less than all else of a request.

Daemon and this process compute on the processor, or with ``--device cuda`` on the first GPU. Every answer is compared with what
its set holds. Exit status 1: an answer was wrong. Times are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.client
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensord_client
from tensord_client.parameters import layout

from bench.server import serving

_ADDRESS, _METRICS = "127.0.0.1:18180", "127.0.0.1:18182"
_MIB = 1 << 20
_LARGE, _SMALL = 100, 1
#: Sets, and how many of them the device has room for.
_SETS, _ROOM = 1000, 100
#: Requests of one kind before those of the other, each on a connection of its own.
_TURN = 10
#: MiB that are enough for 16 adapters of a model with ``batch_sets``, side by side.
_STACK = 8
#: The share of a GPU's memory that JAX takes.
_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
#: The models of each row, and MiB of their pushed sets on the device: a GPU has the new one beside the old until the exchange.
_ROWS_MODELS = {
    "push": (["large"], 2 * _LARGE),
    "network": (["network"], 2 * _LARGE),
    "while": (["small"], 4 * _SMALL),
    "sets": (["small"], _ROOM),
    "mixed": (["mixed", "mixed-single"], 2 * _STACK),
    "narrow": (["narrow", "narrow-single"], 2 * _STACK),
}
#: Pushes a second, connections and seconds of the row that asks meanwhile.
_PUSHES, _CONNECTIONS, _SECONDS = 10, 4, 3.0
_MODEL = """
from pathlib import Path

import tensord.models

inputs = {"x": "FP32[4]"}
outputs = {"y": "FP32[4]"}
max_batch_size = 8

def create(path, config, device):
    def apply(params, inputs):
        return {"y": inputs["x"] * 0 + params["w"][0, 0] + params["w"][-1, -1]}

    return apply, tensord.models.load(Path(path) / "params.npz")
"""

_LAYERS, _EMBEDDING = 12, 416
_NETWORK = f"""
from pathlib import Path

import jax
import jax.numpy as jnp
import tensord.models

inputs = {{"tokens": "INT32[64]"}}
outputs = {{"y": "FP32[4]"}}
max_batch_size, batch_buckets = 8, (1, 2, 4, 8)

def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

def layer(params, x):
    h = norm(x, params["norm1"])
    q, k, v = (jnp.reshape(h @ params[name], (*h.shape[:2], 8, {_EMBEDDING} // 8)) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / ({_EMBEDDING} // 8) ** 0.5)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ params["o"]
    return x + jax.nn.gelu(norm(x, params["norm2"]) @ params["up"]) @ params["down"]

def create(path, config, device):
    def apply(params, inputs):
        x = params["tokens"][inputs["tokens"]]
        for number in range({_LAYERS}):
            x = layer(params["layers"][str(number)], x)
        # The first layer and the last leaf show which set this is.
        seen = params["layers"]["0"]["down"][0, 0] + params["head"][-1, -1]
        return {{"y": (norm(x, params["norm"])[:, -1] @ params["head"]) * 0 + seen}}

    return apply, tensord.models.load(Path(path) / "params.npz", nested=True)
"""


#: Rows of the base by row of this bench, and sets that are asked at once.
_WIDTHS, _RANK, _TOGETHER = {"mixed": 4096, "narrow": 512}, 4, 16
#: How often they are asked in each round.
_REPEATS = 5


def mixed_model(width: int) -> str:
    """Returns the source of a model with ``batch_sets``, whose input and output have ``width`` elements."""
    return f"""
import jax.numpy as jnp
import numpy as np

inputs = {{"x": "FP32[{width}]"}}
outputs = {{"y": "FP32[{width}]"}}
max_batch_size, batch_buckets = {_TOGETHER}, (1, {_TOGETHER})
batch_sets = ("adapter",)

def create(path, config, device):
    def apply(stacked, inputs, index):
        x, adapter = inputs["x"], stacked["adapter"]
        changed = jnp.einsum("bi,bir,bro->bo", x, adapter["down"][index], adapter["up"][index])
        return {{"y": (stacked["base"] @ x.T).T + changed}}

    zeros = {{"down": np.zeros(({width}, {_RANK}), np.float32), "up": np.zeros(({_RANK}, {width}), np.float32)}}
    return apply, {{"base": np.full(({width}, {width}), 0.5, np.float32), "adapter": zeros}}
"""


def tree(mib: int, value: float) -> dict[str, np.ndarray]:
    """Returns parameters of ``mib`` MiB with which the model answers twice ``value``."""
    return {"w": np.full((mib, _MIB // 4), value, np.float32)}


def network(value: float) -> dict[str, np.ndarray]:
    """Returns the parameters of the transformer, with which it answers twice ``value``."""
    width = _EMBEDDING
    shapes: dict[str, tuple[int, ...]] = {"tokens": (1024, width), "norm": (width,), "head": (width, 4)}
    for layer in range(_LAYERS):
        shapes |= {f"layers.{layer}.{name}": (width,) for name in ("norm1", "norm2")}
        shapes |= {f"layers.{layer}.{name}": (width, width) for name in "qkvo"}
        shapes |= {f"layers.{layer}.up": (width, 4 * width), f"layers.{layer}.down": (4 * width, width)}
    return {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}


def write_models(folder: Path) -> None:
    """Writes all models of the rows into a repository."""
    given = ("large", _MODEL, tree(_LARGE, 0)), ("small", _MODEL, tree(_SMALL, 0)), ("network", _NETWORK, network(0))
    for name, source, parameters in given:
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(source)
        np.savez(version / "params.npz", **parameters)
    for row, width in _WIDTHS.items():
        for name, delay_us in ((row, 50000), (f"{row}-single", 0)):
            (folder / name / "1").mkdir(parents=True)
            (folder / name / "1" / "model.py").write_text(mixed_model(width))
            delay = f"dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }}"
            (folder / name / "config.pbtxt").write_text(f"max_batch_size: {_TOGETHER} {delay if delay_us else ''}")


class Asker:
    """Sends requests to a model over one HTTP connection."""

    def __init__(self, model: str, name: str = "") -> None:
        parameters = {"parameters": {"parameter_set": name}} if name else {}
        given = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]
        if model == "network":
            given = [{"name": "tokens", "datatype": "INT32", "shape": [1, 64], "data": [*range(64)]}]
        self._body = json.dumps({"inputs": given, **parameters}).encode()
        self._path = f"/v2/models/{model}/infer"
        self._connection = http.client.HTTPConnection(_ADDRESS)
        self._connection.connect()
        self.wrong = 0

    def __call__(self) -> float:
        """Sends one request. Returns the value of the parameters that it was computed with."""
        self._connection.request("POST", self._path, self._body)
        with self._connection.getresponse() as answer:
            data = json.loads(answer.read())["outputs"][0]["data"]
        self.wrong += len(set(data)) != 1
        return float(data[0]) / 2

    def close(self) -> None:
        self._connection.close()


def seconds(call: Callable[[], Any]) -> float:
    """Calls a function and returns how many seconds it took."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def post(path: str, body: bytes, head_size: int | None = None) -> Any:
    """Posts a request that is not an inference request; returns the answer's JSON. Raises SystemExit: it is refused.

    ``head_size``: bytes of JSON at the body's beginning; None: the whole body is JSON.
    """
    head = {} if head_size is None else {"Inference-Header-Content-Length": str(head_size)}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://{_ADDRESS}{path}", body, head)) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{path}: {error.read().decode()}") from None


@contextlib.contextmanager
def region(content: bytes) -> Iterator[str]:
    """Registers shared memory with this content within the block; yields the region's name."""
    path = Path("/dev/shm", f"tensord-bench-{os.getpid()}")
    path.write_bytes(content)
    try:
        said = {"key": f"/{path.name}", "byte_size": len(content)}
        post("/v2/systemsharedmemory/region/parameters/register", json.dumps(said).encode())
        yield "parameters"
        post("/v2/systemsharedmemory/region/parameters/unregister", b"")
    finally:
        path.unlink()


def push_row(rounds: int, client: tensord_client.Client, socket: Path, name: str = "large") -> int:
    """Measures the row ``push`` or ``network``: 100 MiB pushed, beside ``device_put`` and a reload. Returns wrong answers."""
    model, ask = client.model(name), Asker(name)
    made = network if name == "network" else functools.partial(tree, _LARGE)
    wanted = made(1)
    content = b"".join(layout(wanted))
    found: dict[str, list[float]] = {"device_put": [], "region": [], "tree": [], "reload": []}
    wrong = 0

    def placed() -> None:
        jax.block_until_ready(jax.device_put(wanted))

    with region(content) as shared:
        said = json.dumps({"region": shared, "byte_size": len(content)}).encode()
        placed()
        for number in range(1, rounds + 1):
            found["device_put"].append(seconds(placed))
            found["region"].append(seconds(lambda: post(f"/v2/models/{name}/parameters/main", said)))
            wrong += ask() != 1
            other = made(1 + number)
            found["tree"].append(seconds(lambda: model.parameters.update(other)))  # noqa: B023
            wrong += ask() != 1 + number
            found["reload"].append(seconds(lambda: post(f"/v2/repository/models/{name}/load", b"{}")))
            wrong += ask() != 0
    medians = {way: statistics.median(values) for way, values in found.items()}
    for way in ("region", "tree"):
        beside = medians[way] / medians["device_put"], medians[way] / medians["reload"]
        print(f"{name:7} {way:7} {medians[way] * 1e3:8.1f} ms, {beside[0]:.2f} x device_put, {beside[1]:.3f} x reload")
    print(f"     device_put {medians['device_put'] * 1e3:.1f} ms, reload {medians['reload'] * 1e3:.1f} ms", flush=True)
    return wrong + ask.wrong


def p99(until: float) -> tuple[float, int]:
    """Sends requests on some connections until a time. Returns the p99 in ms and how many answers were wrong.

    ``until``: on the clock of time.perf_counter.
    """

    def run() -> tuple[list[float], int]:
        took = []
        with contextlib.closing(Asker("small")) as ask:
            while time.perf_counter() < until:
                took.append(seconds(ask))
            return took, ask.wrong

    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        found = [one.result() for one in [threads.submit(run) for _ in range(_CONNECTIONS)]]
    return float(np.percentile([each for took, _ in found for each in took], 99)) * 1e3, sum(bad for _, bad in found)


def while_row(rounds: int, client: tensord_client.Client, socket: Path) -> int:
    """Measures the row ``while``: requests while parameters are pushed ten times a second, and without. Returns wrong answers."""
    parameters = client.model("small").parameters
    found: dict[bool, list[float]] = {False: [], True: []}
    wrong = pushes = 0
    for number in range(2 * rounds):
        until = time.perf_counter() + _SECONDS

        def push(until: float = until) -> None:
            nonlocal pushes
            while time.perf_counter() < until:
                time.sleep(1 / _PUSHES)
                parameters.update(tree(_SMALL, pushes))
                pushes += 1

        with ThreadPoolExecutor(1) as pusher:
            pushed = pusher.submit(push) if number % 2 else None
            took, bad = p99(until)
            if pushed is not None:
                pushed.result()
        found[bool(number % 2)].append(took)
        wrong += bad
    quiet, busy = (statistics.median(found[key]) for key in (False, True))
    print(f"while  p99 {quiet:.2f} ms quiet, {busy:.2f} ms with {pushes} pushes: {busy / quiet:.2f} x", flush=True)
    return wrong


def shifted(parameters: dict[str, np.ndarray]) -> bytes:
    """Returns parameters in safetensors' layout, each array 8 bytes off the alignment at which XLA would not copy it."""
    head, *arrays = layout(parameters)
    text = bytes(head)[8:] + b" " * 8
    return b"".join((len(text).to_bytes(8, "little"), text, *arrays))


def shifted_array(value: float) -> np.ndarray:
    """Returns an array of 1 MiB at an alignment at which XLA copies it."""
    memory = np.full(_MIB // 4 + 16, value, np.float32)
    at = -(memory.ctypes.data // 4) % 16 + 2
    return memory[at % 16 :][: _MIB // 4]


def counted(metric: str, model: str) -> int:
    """Returns the value of one of the daemon's counters for a model so far, over all its versions."""
    with urllib.request.urlopen(f"http://{_METRICS}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(rf'^{metric}\{{model="{model}".*\}} (\S+)', text, re.MULTILINE)
    return sum(map(int, map(float, found)))


def sets_row(rounds: int, client: tensord_client.Client, socket: Path) -> int:
    """Measures the row ``sets``: requests whose set is on the device, and whose set is not. Returns wrong answers."""
    client.model("small").parameters.update(tree(_SMALL, 5000))
    for number in range(_SETS):
        post(f"/v2/models/small/parameters/s{number}", shifted(tree(_SMALL, number)), 0)
    mains = [Asker("small") for _ in range(_TURN)]
    askers = [Asker("small", f"s{number}") for number in range(_SETS)]
    away, arrays = range(_ROOM, _SETS, 5), [shifted_array(number) for number in range(2 * _ROOM)]
    found: dict[str, list[float]] = {"main": [], "hit": [], "first": [], "beside": [], "miss": [], "copy": []}
    placed: deque[Any] = deque(maxlen=_ROOM)
    wrong = 0
    # A request of a kind that never came is checked; those behind it are known.
    for _ in range(3):
        for number in away:
            found["first"].append(seconds(askers[number]))
    del found["first"][len(away) :]
    before = counted("tensord_parameter_misses_total", "small")
    for _ in range(rounds):
        for number in range(_TURN):
            wrong += askers[number]() != number
        for _ in range(10):
            found["main"] += [seconds(main) for main in mains]
            found["hit"] += [seconds(askers[number]) for number in range(_TURN)]
        for at in range(0, len(away), _TURN):
            found["beside"] += [seconds(askers[number]) for number in range(_TURN)]
            found["miss"] += [seconds(askers[number]) for number in away[at : at + _TURN]]
            for each in arrays[at : at + _TURN]:
                found["copy"].append(seconds(lambda: placed.append(jax.block_until_ready(jax.device_put(each)))))  # noqa: B023
    came = counted("tensord_parameter_misses_total", "small") - before
    wrong += mains[0]() != 5000
    for number in range(0, _SETS, 37):
        wrong += askers[number]() != number
    medians = {name: statistics.median(values) * 1e6 for name, values in found.items()}
    more = (medians["miss"] - medians["beside"]) / medians["copy"]
    rate = medians["main"] / medians["hit"]
    print(f"sets   main {medians['main']:.0f} us, hit {medians['hit']:.0f} us: {rate:.3f} of its rate")
    print(f"       miss {medians['miss']:.0f} us, hit between them {medians['beside']:.0f} us:", end=" ")
    print(f"{more:.2f} copies ({medians['copy']:.0f} us) more; {came} came back")
    print(f"       first request for a set, which is not there {medians['first']:.0f} us", flush=True)
    for each in (*mains, *askers):
        wrong += each.wrong
        each.close()
    return wrong


def function_alone(width: int) -> Callable[[int], None]:
    """Returns a call of the model's function for so many rows, each with a set of its own, or for one, without a server."""
    source: dict[str, Any] = {}
    exec(mixed_model(width), source)
    apply, tree = source["create"](None, None, None)
    stacked = {name: np.stack([leaf] * _TOGETHER) for name, leaf in tree["adapter"].items()}
    parameters = jax.device_put({"base": tree["base"], "adapter": stacked})
    x, index = {"x": np.zeros((_TOGETHER, width), np.float32)}, np.arange(_TOGETHER, dtype=np.int32)
    made = {
        rows: jax.jit(apply).lower(parameters, {"x": x["x"][:rows]}, index[:rows]).compile() for rows in (1, _TOGETHER)
    }

    def call(rows: int) -> None:
        np.asarray(made[rows](parameters, {"x": x["x"][:rows]}, index[:rows])["y"])

    return call


def mixed_row(rounds: int, client: tensord_client.Client, socket: Path, row: str = "mixed") -> int:
    """Measures the row ``mixed`` or ``narrow``: requests of 16 sets at once, and one after the other. Returns wrong answers."""
    width, names = _WIDTHS[row], (row, f"{row}-single")
    for number in range(_TOGETHER):
        down = np.full((width, _RANK), number, np.float32)
        adapter = {"down": down, "up": np.ones((_RANK, width), np.float32)}
        for name in names:
            client.model(name).parameters.update({"adapter": adapter}, set=f"m{number}")
    alone_once = function_alone(width)
    found: dict[str, list[float]] = {"at once": [], "no delay": [], "in turn": [], "XLA at once": [], "XLA in turn": []}
    wrong, calls = asyncio.run(_mixed(rounds, socket, row, found))
    for _ in range(_REPEATS * rounds):
        found["XLA at once"].append(seconds(lambda: alone_once(_TOGETHER)))
        found["XLA in turn"].append(_TOGETHER * seconds(lambda: alone_once(1)))
    once, joined, turn, xla_once, xla_turn = (statistics.median(values) * 1e3 for values in found.values())
    print(f"{row:6} {_TOGETHER} sets at once, in {calls:.1f} calls: {once:.1f} ms", end=", ")
    print(f"one after the other {turn:.1f} ms: {turn / once:.1f} x")
    print(f"       at once, where none waits for others {joined:.1f} ms: {turn / joined:.1f} x")
    print(f"       the function alone {xla_once:.1f} ms, {xla_turn:.1f} ms: {xla_turn / xla_once:.1f} x", flush=True)
    return wrong


async def _mixed(rounds: int, socket: Path, row: str, found: dict[str, list[float]]) -> tuple[int, float]:
    """Sends the requests of ``mixed_row`` from one event loop, and adds the seconds that they took to ``found``.

    Returns how many answers were wrong, and how many calls of the model 16 requests at once took.
    """
    wrong = 0
    x = np.zeros((1, _WIDTHS[row]), np.float32)
    x[0, 0] = 1

    def check(answers: list[Any]) -> None:
        nonlocal wrong
        wrong += sum(not np.all(answer["y"] == 0.5 + number * _RANK) for number, answer in enumerate(answers))

    async def timed(models: list[Any], together: bool) -> float:
        began = time.perf_counter()
        calls = [model({"x": x}) for model in models]
        answers = await asyncio.gather(*calls) if together else [await call for call in calls]
        took = time.perf_counter() - began
        check(answers)
        return took

    async with await tensord_client.connect_async(socket) as client:
        together, alone = [
            [await client.model(name, parameter_set=f"m{number}") for number in range(_TOGETHER)]
            for name in (row, f"{row}-single")
        ]
        for _ in range(3):
            for models, at_once in ((together, True), (alone, True), (alone, False)):
                await timed(models, at_once)
        before = counted("nv_inference_exec_count", row)
        for _ in range(_REPEATS * rounds):
            found["at once"].append(await timed(together, True))
            found["no delay"].append(await timed(alone, True))
            found["in turn"].append(await timed(alone, False))
        return wrong, (counted("nv_inference_exec_count", row) - before) / (_REPEATS * rounds)


ROWS: dict[str, Callable[[int, tensord_client.Client, Path], int]] = {
    "push": push_row,
    "network": functools.partial(push_row, name="network"),
    "while": while_row,
    "sets": sets_row,
    "mixed": mixed_row,
    "narrow": functools.partial(mixed_row, row="narrow"),
}


def compute_on(device: str) -> None:
    """Lets JAX in this process compute on the processor, or on the first GPU, of whose memory it leaves most to the daemon."""
    jax.config.update("jax_platforms", device)
    os.environ[_MEMORY] = "0.1"
    jax.devices()
    del os.environ[_MEMORY]


@contextlib.contextmanager
def daemon(folder: Path, device: str, row: str) -> Iterator[tuple[tensord_client.Client, Path]]:
    """Serves a row's models within the block; yields a client that is connected over a lane, and the socket for others."""
    models, mib = _ROWS_MODELS[row]
    clients = folder / "clients.sock"
    configuration = folder / f"{row}.toml"
    configuration.write_text(
        f"""
        [repository]
        paths = ["{folder / "models"}"]
        control_mode = "explicit"
        load = {json.dumps(models)}
        [http]
        port = {_ADDRESS.partition(":")[2]}
        [grpc]
        enabled = false
        [metrics]
        port = {_METRICS.partition(":")[2]}
        [workers]
        device = "{device}"
        parameter_byte_size = {mib * _MIB}
        [clients]
        socket = "{clients}"
        [supervisor]
        control_socket = "{folder / "control.sock"}"
        [executables]
        cache_directory = "{folder / "cache"}"
        """
    )
    command = [sys.executable, "-m", "tensord", "serve", "--config", str(configuration)]
    with serving(command, _ADDRESS, folder / f"{row}.log"), tensord_client.connect(clients) as client:
        yield client, clients


def main() -> int:
    """Serves each row's models, measures the row and prints it."""
    parser = argparse.ArgumentParser(
        prog="bench.parameters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default=",".join(ROWS), help="of push, network, while, sets, mixed and narrow")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what daemon and this process compute on"
    )
    arguments = parser.parse_args()
    compute_on(arguments.device)
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_models(folder / "models")
        (folder / "cache").mkdir(mode=0o700)
        for row in arguments.rows.split(","):
            with daemon(folder, arguments.device, row) as (client, socket):
                wrong += ROWS[row](arguments.rounds, client, socket)
    if wrong:
        print(f"{wrong} answers were wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
