"""A program is plain only if nothing in it depends on what its data happen to be while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tensord.workers.programs.cache_directory import CacheDirectory
from tensord.workers.programs.executable_cache import ExecutableCache
from tensord.workers.programs.placement import CompiledProgram, Placement
from tensord.workers.programs.plain_program import is_plain
from tests.workers.parameters.made_sets import loaded

X = jax.ShapeDtypeStruct((64, 64), np.float32)
CONSTANT = np.arange(90_000, dtype=np.float32).reshape(300, 300)

PLAIN: dict[str, Callable[[Any], Any]] = {
    "constants": lambda x: x[:1, :1] + CONSTANT,
    "half": lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16),
    "elementwise": lambda x: jnp.where(x > 0, jnp.exp(jnp.tanh(x)), jax.nn.gelu(x)),
    "reductions": lambda x: (x.sum(0), x.max(1), jnp.argmax(x, 1), jnp.all(x > 0)),
    "pooling": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    "moves": lambda x: jnp.concatenate([x[::-1].T, jnp.roll(x, 3), jnp.pad(x[2:, ::2], ((1, 1), (0, 0)))], 1),
    "one hot": lambda x: jax.nn.one_hot(x[:, 0].astype(int), 64),
}
#: They compute, and XLA puts something on the way where an output will be.
SHARING: dict[str, Callable[[Any], Any]] = {
    "network": lambda x: jax.nn.relu(jax.nn.relu(x @ x + 1) @ x),
    "attention": lambda x: jax.nn.dot_product_attention(*[x.reshape(1, 64, 4, 16)] * 3),
    "softmax": lambda x: jax.nn.softmax(x @ x),
    "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5),
    "integers": lambda x: x.astype(int) // (x.astype(int) + 1),
    "running sum": lambda x: jnp.cumsum(x, 0),
    "convolution": lambda x: lax.conv_general_dilated(x[None, None], jnp.ones((8, 1, 3, 3)), (1, 1), "SAME"),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "sort": lambda x: jnp.sort(x),
    "argsort": lambda x: jnp.argsort(x),
    "top k": lambda x: lax.top_k(x, 4),
    "median": lambda x: jnp.median(x),
    "gather": lambda x: x[x[:, 0].astype(int)],
    "take": lambda x: jnp.take(x, x[:, 0].astype(int), axis=0),
    "scatter": lambda x: x.at[x[:, 0].astype(int)].set(1.0),
    "scatter add": lambda x: x.at[x[:, 0].astype(int)].add(1.0),
    "dynamic slice": lambda x: lax.dynamic_slice(x, (x[0, 0].astype(int), 0), (3, 3)),
    "dynamic update": lambda x: lax.dynamic_update_slice(x, x[:3, :3], (x[0, 0].astype(int), 0)),
    "roll": lambda x: jnp.roll(x, x[0, 0].astype(int)),
    "while": lambda x: lax.while_loop(lambda c: c[0, 0] < 5, lambda c: c + 1, x),
    "fori": lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, c: c + i, x),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x)[1],
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "switch": lambda x: lax.switch(x[0, 0].astype(int), [jnp.sin, jnp.cos, jnp.tan], x),
    "cholesky": lambda x: jnp.linalg.cholesky(x),
    "fft": lambda x: jnp.fft.fft(x).real,
    "random": lambda x: x + jax.random.normal(jax.random.key(3), (64, 64)),
    "callback": lambda x: jax.pure_callback(lambda a: a, X, x),
    "gradient of pooling": lambda x: jax.grad(
        lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()
    )(x),
    "deep inside": lambda x: jax.nn.softmax(x @ jnp.sort(x)) + 1,
}


def compiled(function: Callable[[Any], Any]) -> Any:
    return jax.jit(function).lower(X).compile()


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str) -> None:
    assert is_plain(compiled(PLAIN[name]))


@pytest.mark.parametrize("name", SHARING)
def test_one_that_leaves_more_than_its_outputs_is_not_plain(name: str) -> None:
    made = compiled(SHARING[name])
    assert not is_plain(made)
    # It is for that reason alone.
    made.runtime_executable = compiled(PLAIN["elementwise"]).runtime_executable
    assert is_plain(made)


@pytest.mark.parametrize("name", OTHERS)
def test_not_plain(name: str) -> None:
    assert not is_plain(compiled(OTHERS[name]))


def test_of_a_program_from_the_cache(tmp_path: Path) -> None:
    cache = ExecutableCache(CacheDirectory(tmp_path))
    for name, function in (("plain", PLAIN["half"]), ("other", OTHERS["sort"]), ("sharing", SHARING["softmax"])):
        key = cache.key((name.encode(),))
        cache.store(key, CompiledProgram(compiled(function), Placement(loaded(()))))
        found = cache.load(key, Placement(loaded(())))
        assert found is not None
        assert is_plain(found.call) == (name == "plain")


class Text:
    """A plain program that returns another text."""

    def __init__(self, text: Any) -> None:
        self.text = text
        self.runtime_executable = compiled(PLAIN["elementwise"]).runtime_executable

    def as_text(self) -> Any:
        if isinstance(self.text, Exception):
            raise self.text
        return self.text


HEAD = "HloModule m\n\nENTRY %main (x: f32[2]) -> f32[2] {\n  %x = f32[2]{0} parameter(0)\n"


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("  ROOT %y = f32[2]{0} negate(%x)", True),
        ('  ROOT y.1 = (f32[2]{0}, /*index=1*/f32[]) tuple(x, x), metadata={op_name="a sort(b)"}', True),
        ("  ROOT %y = f32[2]{0} sort(%x)", False),
        ('  ROOT %y = f32[2]{0} sort(%x), metadata={op_name=" negate("}', False),
        ("  ROOT %y = (f32[2]{0}, f32[]) custom-call(%x)", False),
        ("  ROOT %y z = f32[2]{0} negate(%x)", False),
        ("  ROOT %y = f32[2]{0} NEGATE(%x)", False),
        ("  something else", False),
    ],
)
def test_every_line_is_read(line: str, plain: bool) -> None:
    assert is_plain(Text(HEAD + line + "\n}\n")) is plain


class Statistics:
    """The statistics of a program's memory."""

    def __init__(self, assignment: bytes | None) -> None:
        self.serialized_buffer_assignment_proto = assignment

    def get_compiled_memory_stats(self) -> Statistics:
        return self


@pytest.mark.parametrize("assignment", [None, b"", b"\x0a\x00", b"\x1a\x02\x38\x01", b"\xff"])
def test_what_is_not_known_to_be_alone_is_not_plain(assignment: bytes | None) -> None:
    program = Text(HEAD + "  ROOT %y = f32[2]{0} negate(%x)\n}\n")
    assert is_plain(program)
    program.runtime_executable = lambda: Statistics(assignment)
    assert not is_plain(program)


@pytest.mark.parametrize("text", ["", None, "HloModule m\n", NotImplementedError("no text here")])
def test_what_cannot_be_read_is_not_plain(text: Any) -> None:
    assert not is_plain(Text(text))
