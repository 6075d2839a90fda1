"""Trains examples/models/writer on the documentation that comes with Python and writes its parameters.

    python examples/train_writer.py            (half an hour on one CPU core)

Its text is what this Python brings along: the topics of ``help()`` and the docstrings of the standard library, each with the
name and arguments of what it describes. One in fifty is held out. Every seed is fixed, but another version of Python has other
documentation.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import runpy
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VERSION = Path(__file__).parent / "models" / "writer" / "1"
#: What the model's module holds: what is trained is what is served.
MODEL: dict[str, Any] = runpy.run_path(str(VERSION / "model.py"))

LAYERS, WIDTH = 3, 128
BATCH, LENGTH = 10, 192
#: Of what is multiplied with: each update is as large in every direction (Muon). Of the rest: Adam.
MATRIX_RATE, MOMENTUM = 0.02, 0.95
RATE, DECAY_1, DECAY_2, EPSILON = 4e-3, 0.9, 0.98, 1e-8
#: The share of the steps at the end in which the rates fall to zero.
COOLING = 0.5
SHORTEST = 60
#: Folders of the standard library with other texts than documentation.
_OTHERS = {"test", "tests", "idle_test", "site-packages", "lib2to3", "idlelib", "turtledemo", "__pycache__"}


def documents() -> list[str]:
    """Returns every topic and every docstring long enough to learn from, each text once."""
    try:
        topics = dict(importlib.import_module("pydoc_data.topics").topics)
    except ImportError:  # some distributions leave it out
        topics = {}
    texts = [text.strip() for _, text in sorted(topics.items())]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not _OTHERS.intersection(path.relative_to(library).parts):
            texts += _docstrings(path, ".".join(path.relative_to(library).with_suffix("").parts))
    return [text for text in dict.fromkeys(texts) if len(text) >= SHORTEST]


def _docstrings(path: Path, module: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = inspect.cleandoc(ast.get_docstring(node) or "")
            if len(text) >= SHORTEST:
                yield f"{_title(node, module)}\n\n{text}"


def _title(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, module: str) -> str:
    if isinstance(node, ast.Module):
        return module
    return f"class {node.name}" if isinstance(node, ast.ClassDef) else f"{node.name}({ast.unparse(node.args)})"


def splits() -> dict[str, np.ndarray]:
    """Returns the characters' numbers of "train" and "held_out": the documents one after the other, each after an end mark."""
    texts = documents()
    order = np.random.default_rng(0).permutation(len(texts))
    chosen = {"train": [i for i in order if i % 50], "held_out": [i for i in order if not i % 50]}
    codes = {name: b"\0" + b"\0".join(texts[i].encode("ascii", "replace") for i in of) for name, of in chosen.items()}
    known = np.array(MODEL["_NUMBERS"])
    known[0] = 0
    return {name: known[np.frombuffer(text, np.uint8)] for name, text in codes.items()}


def initial(random: np.random.Generator) -> dict[str, Any]:
    """Returns untrained parameters: weights scaled to their fan-in; those that add to the residual stream are zero."""
    count = len(MODEL["CHARACTERS"]) + 1

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) * scale, jnp.float32)

    def layer() -> dict[str, jax.Array]:
        return {
            "qkv": normal(WIDTH, 3 * WIDTH, scale=WIDTH**-0.5),
            "out": jnp.zeros((WIDTH, WIDTH)),
            "up": normal(WIDTH, 4 * WIDTH, scale=WIDTH**-0.5),
            "down": jnp.zeros((4 * WIDTH, WIDTH)),
        }

    return {
        "embedding": normal(count, WIDTH, scale=0.5),
        "pairs": jnp.zeros((count, count, WIDTH)),
        "layers": [layer() for _ in range(LAYERS)],
        "next": jnp.zeros((WIDTH, count)),
    }


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the cross entropy in nats a character. ``tokens``: INT32[batch, length]."""
    at = jnp.arange(tokens.shape[1] - 2)
    before, seen, following = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
    logits = MODEL["network"](params, before, seen, jnp.broadcast_to(at, seen.shape), MODEL["windowed"](at))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), following[:, :, None], axis=-1).mean()


def orthogonal(update: jax.Array) -> jax.Array:
    """Approximates the nearest matrix with orthogonal rows or columns: Newton-Schulz iteration with Muon's coefficients."""
    x = update if update.shape[0] <= update.shape[1] else update.T
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x if update.shape[0] <= update.shape[1] else x.T


def share(count: int, steps: int) -> float:
    """Returns the factor of the learning rates in a step: it rises in the first 50 and falls to 0 at the end."""
    return min(1.0, count / 50, (steps - count) / (COOLING * steps))


def make_step() -> Callable[..., Any]:
    """Returns a compiled function that makes one update.

    It takes the parameters, the first and second moments, the step's number, its factor of the rates and a batch; it returns the
    first three updated, and the loss.
    """

    def update(path: Any, p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array, count: Any, share: Any) -> Any:
        if path[0].key == "layers":
            m = MOMENTUM * m + g
            scale = max(1, p.shape[1] / p.shape[0]) ** 0.5
            return p - MATRIX_RATE * share * scale * orthogonal(g + MOMENTUM * m), m, v
        m, v = DECAY_1 * m + (1 - DECAY_1) * g, DECAY_2 * v + (1 - DECAY_2) * g * g
        return p - RATE * share * (m / (1 - DECAY_1**count)) / (jnp.sqrt(v / (1 - DECAY_2**count)) + EPSILON), m, v

    @jax.jit
    def step(params: Any, first: Any, second: Any, count: Any, share: Any, tokens: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        made = jax.tree_util.tree_map_with_path(
            lambda path, *leaves: update(path, *leaves, count, share), params, gradient, first, second
        )
        return *jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), made), value

    return step


def train(steps: int, say: Callable[[str], None] = print) -> Any:
    """Trains for ``steps`` batches of pieces from anywhere in the text; returns the parameters."""
    texts = splits()
    say(", ".join(f"{name}: {len(text)} characters" for name, text in texts.items()))
    random = np.random.default_rng(0)
    params = initial(random)
    first = second = jax.tree.map(jnp.zeros_like, params)
    step, check, began = make_step(), jax.jit(loss), time.monotonic()
    values: list[float] = []
    for count in itertools.count(1):
        starts = random.integers(0, len(texts["train"]) - LENGTH, BATCH)
        batch = np.stack([texts["train"][start : start + LENGTH + 2] for start in starts])
        params, first, second, value = step(params, first, second, float(count), share(count, steps), batch)
        values.append(float(value))
        if count % 100 == 0 or count == steps:
            say(f"{count} of {steps}: {np.mean(values[-100:]):.3f} nats a character, {time.monotonic() - began:.0f} s")
        if count >= steps:
            break
    pieces = texts["held_out"][: len(texts["held_out"]) // (LENGTH + 2) * (LENGTH + 2)].reshape(-1, LENGTH + 2)
    held_out = [float(check(params, piece)) for piece in np.array_split(pieces, max(1, len(pieces) // BATCH))]
    say(f"held out: {np.mean(held_out):.3f} nats a character")
    return params


def main() -> None:
    """Trains the model and writes its parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=VERSION / "params.npz")
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    params = train(arguments.steps, lambda line: print(line, flush=True))
    flat = {name: params[name] for name in ("embedding", "pairs", "next")}
    for i, layer in enumerate(params["layers"]):
        flat |= {f"{name}_{i}": weight for name, weight in layer.items()}
    np.savez_compressed(arguments.output, **{name: np.asarray(weight, np.float16) for name, weight in flat.items()})


if __name__ == "__main__":
    main()
