"""Measures derivatives: ``python -m bench.derivatives [--peer PYTHON] [--rounds N] [--rows ROW,...]``.

PYTHON is one of an environment with the peer: ``pip install 'tesseract-core[runtime]' tesseract-jax uvloop httptools``.

grad        the gradient of a small energy, with JAX over a lane, beside its value and the compute's own difference (at most 1.3);
            grad-numpy: without JAX in the client; grad-layer: of a function with 64 outputs, one product, with JAX
cotangents  64 cotangents by vmap beside one (at most 3); cotangents-numpy: 64 rows beside one, without JAX
peer        the gradient beside tesseract-jax, which asks its own server of the same function (at most 0.1); peer-layer: of the
            function with 64 outputs; peer-gateway: tesseract-jax at the gateway beside tesseract-jax at its own server
sums        the gradient of a number by 16 MiB beside the value's call and a copy of 16 MiB (at most 1.2), without JAX;
            sums-alone: the same in one process without a server, which is the processor's share of it;
            scaled: 16 MiB pulled back to 16 MiB, which takes 16 MiB besides, beside the same

All sides are asked in turn in each round. Gradients are compared. Figures are medians of the rounds, of medians of calls.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import runpy
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensord_client

from bench.derivatives.peer import MODELS, function, seconds
from bench.helper import helper, line
from bench.server import serving

#: Row -> the most that its ratio may be, the call that is measured, and calls whose times ("-": less) it is divided by.
_ROWS = {
    "grad": (1.3, "grad", ("value", "grad alone", "-value alone")),
    "grad-numpy": (1.3, "grad numpy", ("value numpy", "grad alone", "-value alone")),
    "grad-layer": (1.3, "layer grad", ("layer", "layer grad alone", "-layer alone")),
    "cotangents": (3, "64 cotangents", ("layer grad",)),
    "cotangents-numpy": (3, "64 rows", ("one row",)),
    "peer": (0.1, "grad", ("peer energy",)),
    "peer-layer": (0.1, "layer grad", ("peer layer",)),
    "peer-gateway": (1, "gateway energy", ("peer energy",)),
    "sums": (1.2, "sums grad", ("sums", "copy")),
    "sums-alone": (1.2, "sums alone grad", ("sums alone", "copy")),
    "scaled": (1.2, "scaled grad", ("scaled", "copy")),
}
#: First words of the names of slow calls, how many of these are measured in a turn, and how many of all others.
_SLOW, _FEW, _MANY = ("sums", "scaled", "copy", "peer", "gateway"), 20, 200
_LARGE = 1 << 22


def calls(client: tensord_client.Client) -> dict[str, Callable[[], Any]]:
    """Returns what this process asks or computes, by name. Raises AssertionError: a gradient is not that of the function."""
    energy, layer, sums, scaled = (client.model(name) for name in ("energy", "layer", "sums", "scaled"))
    served = [tensord_client.jax(each) for each in (energy, layer)]
    value, layered = (jax.jit(lambda x, of=each: of({"x": x[None]})["y"][0]) for each in served)
    alone, layered_alone = (jax.jit(function(name)[0]) for name in ("energy", "layer"))
    gradient, gradient_alone = (jax.jit(jax.grad(each)) for each in (value, alone))
    product, product_alone = (
        jax.jit(lambda x, y, of=each: jax.vjp(of, x)[1](y)[0]) for each in (layered, layered_alone)
    )
    products, row = jax.jit(jax.vmap(product, (None, 0))), function("energy")[1]
    many, (x, y, to) = np.tile(row, (64, 1)), np.ones((3, _LARGE), np.float32)
    np.testing.assert_allclose(gradient(row), gradient_alone(row), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(products(row, many)[63], product_alone(row, row), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(sums.value_and_gradient({"x": x})[1]["x"], x)
    apply, params = runpy.run_path(str(MODELS / "sums" / "1" / "model.py"))["create"](None, None, None)
    sum_alone = jax.jit(lambda x: apply(params, {"x": x})["y"])
    sum_grad_alone, put = jax.jit(jax.value_and_grad(sum_alone)), jax.device_put(x)
    np.testing.assert_array_equal(sum_grad_alone(put)[1], x)
    return {
        "value": lambda: value(row),
        "grad": lambda: gradient(row),
        "value alone": lambda: alone(row),
        "grad alone": lambda: gradient_alone(row),
        "value numpy": lambda: energy({"x": row[None]}),
        "grad numpy": lambda: energy.value_and_gradient({"x": row[None]}),
        "layer": lambda: layered(row),
        "layer grad": lambda: product(row, row),
        "layer alone": lambda: layered_alone(row),
        "layer grad alone": lambda: product_alone(row, row),
        "64 cotangents": lambda: products(row, many),
        "one row": lambda: layer.pull_back({"x": many[:1]}, {"y": many[:1]}),
        "64 rows": lambda: layer.pull_back({"x": many}, {"y": many}),
        "sums": lambda: sums({"x": x}),
        "sums grad": lambda: sums.value_and_gradient({"x": x}),
        "sums alone": lambda: sum_alone(put),
        "sums alone grad": lambda: sum_grad_alone(put),
        "scaled": lambda: scaled({"x": x}),
        "scaled grad": lambda: scaled.pull_back({"x": x}, {"y": y}),
        "copy": lambda: np.copyto(to, x),
    }


class Peer:
    """A client of tesseract-jax in the peer's Python, and the server that it asks."""

    def __init__(self, stack: contextlib.ExitStack, python: str, name: str, daemon: Path) -> None:
        side, model = name.split()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        (of, row), url = function(model), f"http://127.0.0.1:{port}"
        self._gradient = jax.grad(lambda x: of(x).sum())(row)
        if side == "gateway":
            url += f"/{model}"
            words = ("--server", str(daemon), "--address", f"127.0.0.1:{port}")
            stack.enter_context(helper("tensord_client.tesseract", *words))
        else:
            stack.enter_context(helper("bench.derivatives.peer", "serve", str(port), model, python=python))
        self._asking = stack.enter_context(helper("bench.derivatives.peer", "ask", url, python=python))

    def __call__(self, count: int) -> list[float]:
        """Returns the seconds of so many calls. Raises AssertionError: the gradient is not that of the function."""
        assert self._asking.stdin is not None
        self._asking.stdin.write(f"{count}\n")
        self._asking.stdin.flush()
        gradient, taken = json.loads(line(self._asking))
        np.testing.assert_allclose(gradient, self._gradient, rtol=1e-4, atol=1e-5)
        return list(taken)


def main() -> None:
    """Measures, and prints a line for each row."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.derivatives", description=__doc__, formatter_class=formatter)
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", default=",".join(_ROWS))
    arguments = parser.parse_args()
    rows = {name: _ROWS[name] for name in arguments.rows.split(",") if arguments.peer or "peer" not in name}
    names = sorted({name.lstrip("-") for _, one, others in rows.values() for name in (one, *others)})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "serve.toml"
        config.write_text(
            f'[repository]\npaths = ["{MODELS}"]\n[http]\nport = 18190\n[grpc]\nenabled = false\n[metrics]\nport = 0\n'
            f'[workers]\ndevice = "cpu"\n[clients]\nsocket = "{folder}/clients.sock"\n'
        )
        daemon = [sys.executable, "-m", "tensord", "serve", "--config", str(config)]
        stack.enter_context(serving(daemon, "127.0.0.1:18190", folder / "daemon.log"))
        own = calls(stack.enter_context(tensord_client.connect(folder / "clients.sock")))
        asked: dict[str, Callable[[int], list[float]]] = {
            name: functools.partial(seconds, own[name]) if name in own else Peer(stack, arguments.peer, name, folder)
            for name in names
        }
        found: list[dict[str, float]] = []
        for number in range(arguments.rounds + 1):
            order = names if number % 2 else names[::-1]
            counts = {name: _FEW if name.split()[0] in _SLOW else _MANY for name in order}
            found.append({name: 1e6 * statistics.median(asked[name](counts[name])) for name in order})
    for name, (most, one, others) in rows.items():
        # The first round warms.
        pairs = [(each[one], sum(-each[o[1:]] if o[0] == "-" else each[o] for o in others)) for each in found[1:]]
        ours, beside = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name:16} {ours:9.1f} us beside {beside:9.1f} us, ratio {ratio:6.3f} (at most {most:g})", flush=True)


if __name__ == "__main__":
    main()
