"""A served model inside of jitted programs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensord_client

from tests import prepared, run_folder
from tests.daemon_process import DaemonProcess
from tests.repositories import applying, scale_model, write_model

#: Run with several devices, of which a process has as many as it says before it uses the first.
SEVERAL = """
import sys
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 4)
import tensord_client
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tensord_client.common.model import Model

asked, ask = [], Model.__call__


def counted(self, inputs, **own):
    asked.append(next(iter(inputs.values())).shape)
    return ask(self, inputs, **own)


Model.__call__ = counted
devices = jax.devices()
mesh, grid = Mesh(np.array(devices), ("a",)), Mesh(np.array(devices).reshape(2, 2), ("a", "b"))
x = np.arange(16, dtype=np.float32).reshape(4, 4)
WHOLE, PART = [(4, 4)], [(1, 4)] * 4


def check(program, given, shapes, right=3 * x + 1):
    asked.clear()
    made = jax.block_until_ready(program(given))
    np.testing.assert_array_equal(made, right)
    # JAX takes it again.
    np.testing.assert_array_equal(made + 1, right + 1)
    assert asked == shapes, asked


with tensord_client.connect(Path(sys.argv[1])) as client:
    scale, total = (tensord_client.jax(client.model(name)) for name in ("scale", "total"))

    def f(x):
        return scale({"x": x})["y"]

    def split(f, mesh=mesh, **how):
        return jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"), **how)

    def sharded(spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    check(jax.jit(f), x, WHOLE)
    check(jax.jit(f), jax.device_put(x, devices[2]), WHOLE)
    assert jax.jit(f)(jax.device_put(x, devices[2])).devices() == {devices[2]}
    for given in map(sharded, (P("a"), P(None, "a"), P())):
        check(f, given, WHOLE)
        check(jax.jit(f), given, WHOLE)
        check(jax.jit(f, out_shardings=NamedSharding(mesh, P("a"))), given, WHOLE)
        check(jax.jit(jax.vmap(lambda row: f(row[None])[0])), given, WHOLE)
        check(jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0]), given, 2 * WHOLE, 9 * x + 4)
    check(jax.jit(split(f)), x, PART)
    check(jax.pmap(f), x[:, None], PART, 3 * x[:, None] + 1)
    with jax.set_mesh(jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))):
        check(jax.jit(f), jax.device_put(x, P("a")), WHOLE)

    def loss(x):
        return total({"x": x})["y"].sum()

    def parts(**how):
        return lambda x: split(lambda x: total({"x": x})["y"], **how)(x).sum()

    check(jax.jit(jax.grad(loss)), sharded(P("a")), WHOLE, 2 * x)
    check(jax.jit(jax.grad(parts(check_vma=False))), x, PART, 2 * x)
    for program, text in (
        (split(f, grid, axis_names={"a"}, check_vma=False), "only supported in spmd computations when all mesh axes"),
        (jax.grad(parts()), "inside of jax.shard_map a served model is differentiated only with check_vma=False"),
    ):
        try:
            jax.jit(program)(x)
        except Exception as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository: Path = scale_model(tmp_path_factory.mktemp("models"))
    write_model(
        repository,
        "pair",
        applying(
            'return {"y": inputs["a"] * np.float32(inputs["b"][0]), "n": np.arange(inputs["b"][0], dtype=np.int32)}',
            "a FP32[2], b INT32[1]",
            "y FP32[2], n INT32[n]",
            more="host = True",
        ),
    )
    write_model(
        repository,
        "total",
        applying(
            'return {"y": jnp.sum(inputs["x"] ** 2, 1, keepdims=True)}',
            "x FP32[4]",
            "y FP32[1]",
            more="max_batch_size, derivatives = 8, True",
        ),
    )
    names = {"b": "BOOL[2]", "h": "BF16[2]", "i": "INT64[2]", "s": "FP32[]", "e": "FP32[n]"}
    write_model(
        repository,
        "same",
        applying(
            'return {name + "o": inputs[name] for name in inputs}',
            ", ".join(f"{name} {kind}" for name, kind in names.items()),
            ", ".join(f"{name}o {kind}" for name, kind in names.items()),
            more="host = True",
        ),
    )
    write_model(
        repository,
        "large",
        applying('return {"y": inputs["x"] + jnp.zeros((1 << 16, 1))}', "x FP32[1]", "y FP32[65536,1]"),
    )
    write_model(
        repository,
        "words",
        applying(
            'return {"y": inputs["x"], "t": inputs["t"]}',
            "x FP32[1], t BYTES[1]",
            "y FP32[1], t BYTES[1]",
            more="host = True",
        ),
    )
    return repository


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[tensord_client.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())
        with tensord_client.connect(repository) as client:
            yield client


def test_jit_and_scan(client: tensord_client.Client) -> None:
    scale = tensord_client.jax(client.model("scale"))

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        return 2 * scale({"x": x + 1})["y"]

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(program(x), 2 * (3 * (x + 1) + 1))

    def step(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        made = scale({"x": carry})["y"]
        return made, made.sum()

    last, sums = jax.jit(lambda x: jax.lax.scan(step, x, None, 3))(x)
    np.testing.assert_array_equal(last, 27 * x + 13)
    assert sums.shape == (3,)


def test_several_calls_in_one_program(client: tensord_client.Client) -> None:
    """JAX lowers equal calls once: each has its own inputs all the same, and its own model."""
    scale, again = (tensord_client.jax(client.model("scale")) for _ in range(2))
    total = tensord_client.jax(client.model("total"))

    @jax.jit
    def program(x: jax.Array) -> list[jax.Array]:
        return [each({"x": factor * x})["y"] for each in (scale, total, again) for factor in (1, 2)]

    x = np.ones((2, 4), np.float32)
    for got, right in zip(program(x), (4, 7, 4, 16, 4, 7), strict=True):
        np.testing.assert_array_equal(got, np.full(got.shape, right))


def test_vmap_goes_into_the_batch(client: tensord_client.Client) -> None:
    """A batch that is larger than one request may be is split: the model has batches of eight."""
    scale = tensord_client.jax(client.model("scale"))
    x = np.arange(5 * 6 * 3 * 4, dtype=np.float32).reshape(5, 6, 3, 4)
    got = jax.jit(jax.vmap(jax.vmap(lambda x: scale({"x": x})["y"])))(x)
    np.testing.assert_array_equal(got, 3 * x + 1)


def test_vmap_of_a_model_without_a_batch(client: tensord_client.Client) -> None:
    pair = tensord_client.jax(client.model("pair"), shapes={"n": (3,)})
    a = jnp.arange(8, dtype=jnp.float32).reshape(4, 2)
    b = jnp.full((1,), 3, jnp.int32)
    got = jax.jit(jax.vmap(lambda a, b: pair({"a": a, "b": b}), in_axes=(0, None)))(a, b)
    np.testing.assert_array_equal(got["y"], 3 * a)
    np.testing.assert_array_equal(got["n"], [[0, 1, 2]] * 4)


def test_a_shape_that_is_not_known(client: tensord_client.Client) -> None:
    pair = tensord_client.jax(client.model("pair"))
    with pytest.raises(tensord_client.InvalidArgument, match=r"output 'n' is INT32\[-1\]: a program needs its shape"):
        jax.jit(lambda a: pair({"a": a, "b": [3]}))(jnp.ones(2))


@pytest.mark.parametrize(
    ("b", "text"),
    [
        ([1.7], "1.7 would become 1"),
        (np.array([1 << 40]), "1099511627776 would become 0"),
        (jnp.array([1.7]), "would become 1"),
        (jnp.array([-3e9]), "would become"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_values_that_would_become_others(client: tensord_client.Client, b: Any, text: str, jitted: bool) -> None:
    """What is known while JAX traces is refused then, the rest when the program runs."""
    pair = tensord_client.jax(client.model("pair"), shapes={"n": (3,)})
    error = jax.errors.JaxRuntimeError if isinstance(b, jax.Array) else tensord_client.InvalidArgument

    def program(a: jax.Array) -> dict[str, jax.Array]:
        return pair({"a": a, "b": b})

    with pytest.raises(error, match=f"input 'b' cannot be an array of INT32: .*{text}"):
        jax.block_until_ready((jax.jit(program) if jitted else program)(jnp.ones(2)))


def test_values_of_another_type_that_stay_what_they_are(client: tensord_client.Client) -> None:
    pair = tensord_client.jax(client.model("pair"), shapes={"n": (3,)})
    for a, b in (([1, 2], [3.0]), (np.array([1, 2]), np.array([3])), (jnp.array([1, 2]), jnp.array([3.0]))):
        got = jax.jit(lambda a, b: pair({"a": a, "b": b}))(a, b) if isinstance(a, jax.Array) else pair({"a": a, "b": b})
        np.testing.assert_array_equal(got["y"], [3, 6])


@pytest.mark.parametrize("how", ["eager", "jitted", "donated", "mapped"])
def test_every_kind_of_array(client: tensord_client.Client, how: str) -> None:
    """Small floats, booleans, 64 bits where the program has 32, scalars and arrays without an element go to and fro."""
    same = tensord_client.jax(client.model("same"), shapes={"eo": (0,)})
    given = {
        "b": jnp.array([True, False]),
        "h": jnp.array([1.5, -2], jnp.bfloat16),
        "i": jnp.array([1, -2]),
        "s": jnp.float32(3),
        "e": jnp.zeros((0,), jnp.float32),
    }
    if how == "mapped":
        given = {name: jnp.stack([array, array]) for name, array in given.items()}
    programs: dict[str, Any] = {
        "eager": same,
        "jitted": jax.jit(same),
        "donated": jax.jit(same, donate_argnums=0),
        "mapped": jax.jit(jax.vmap(same)),
    }
    wanted = {name: np.array(array) for name, array in given.items()}
    got = programs[how](given)
    for name, array in wanted.items():
        assert got[f"{name}o"].dtype == array.dtype
        np.testing.assert_array_equal(got[f"{name}o"], array)


def test_texts_are_refused(client: tensord_client.Client) -> None:
    words = tensord_client.jax(client.model("words"), shapes={"t": (1,)})
    with pytest.raises(tensord_client.InvalidArgument, match="input 't' is BYTES, of which JAX has no arrays"):
        jax.jit(lambda x: words({"x": x, "t": ["a"]}))(jnp.ones(1))
    with pytest.raises(tensord_client.InvalidArgument, match="output 't' is BYTES, of which JAX has no arrays"):
        jax.jit(lambda x: words({"x": x}))(jnp.ones(1))


def test_no_row(client: tensord_client.Client) -> None:
    scale = tensord_client.jax(client.model("scale"))
    got = jax.jit(jax.vmap(lambda x: scale({"x": x})["y"]))(jnp.ones((0, 2, 4)))
    assert got.shape == (0, 2, 4)


def test_without_jit_it_is_compiled_once(client: tensord_client.Client, caplog: pytest.LogCaptureFixture) -> None:
    scale = tensord_client.jax(client.model("scale"))
    x = jnp.ones((2, 4))
    scale({"x": x})
    with jax.log_compiles():
        found = [scale({"x": x})["y"]]
        with jax.disable_jit():
            found.append(jax.jit(scale)({"x": x})["y"])
    np.testing.assert_array_equal(found, np.full((2, 2, 4), 4))
    assert not [record for record in caplog.records if "ompil" in record.message]


def test_errors_while_a_program_runs(client: tensord_client.Client) -> None:
    """Each ends its run, also in the middle of a scan, and says what the client says; the next run goes on as ever."""
    scale, x = tensord_client.jax(client.model("scale")), jnp.ones((2, 4))
    pair = tensord_client.jax(client.model("pair"), shapes={"n": (3,)})

    @jax.jit
    def rolled(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda a, b: (pair({"a": a, "b": b[None]})["y"], None), a, b)[0]

    several = jax.jit(jax.vmap(lambda a, b: pair({"a": a, "b": b[None]})["y"]))
    for _ in range(3):
        for program in (rolled, several):
            with pytest.raises(
                Exception, match=r"InvalidArgument: input 'b' cannot be an array of INT32: .*would become 2"
            ):
                jax.block_until_ready(
                    program(jnp.ones((3, 2)) if program is several else jnp.ones(2), jnp.array([3, 2.5, 3]))
                )
            got = program(jnp.ones((3, 2)) if program is several else jnp.ones(2), jnp.array([3.0, 3, 3]))
            np.testing.assert_array_equal(got, np.full((3, 2), 3) if program is several else [27, 27])
    with pytest.raises(
        Exception, match="Incorrect output shape for return value #1: Expected: \\(2,\\), Actual: \\(3,\\)"
    ):
        jax.block_until_ready(
            jax.jit(tensord_client.jax(client.model("pair"), shapes={"n": (2,)}))({"a": x[0, :2], "b": [3]})
        )
    with pytest.raises(Exception, match="InvalidArgument: inference request batch-size must be <= 8 for 'scale'"):
        jax.block_until_ready(jax.jit(scale)({"x": jnp.ones((9, 4))}))


def test_a_program_with_a_served_model_is_not_exported(client: tensord_client.Client) -> None:
    scale = tensord_client.jax(client.model("scale"))
    with pytest.raises(NotImplementedError, match="serialization of host_callbacks is not yet implemented"):
        jax.export.export(jax.jit(scale))({"x": jnp.ones((2, 4))}).serialize()
    with pytest.raises(NotImplementedError, match="multi-platform lowering for python_callback"):
        jax.export.export(jax.jit(scale), platforms=["cpu", "cuda"])({"x": jnp.ones((2, 4))})


def test_two_programs_at_the_same_time(client: tensord_client.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is in the middle of a request while the other one is, and a thread that computes in Python has its turns."""
    model = client.model("scale")
    programs = [
        jax.jit(lambda x, factor=factor: factor * tensord_client.jax(model)({"x": x})["y"]) for factor in (1, 2)
    ]
    x, both, got = jnp.ones((2, 4)), threading.Barrier(2, timeout=120), dict[int, Any]()
    for program in programs:
        program(x)
    ask = type(model).__call__

    def meet(self: Any, inputs: Any, **own: Any) -> Any:
        both.wait()
        return ask(self, inputs, **own)

    monkeypatch.setattr(type(model), "__call__", meet)

    def run(number: int) -> None:
        got[number] = [np.asarray(programs[number](x * turn)) for turn in range(20)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    turns = 0
    while any(thread.is_alive() for thread in threads):
        turns += 1
    for thread in threads:
        thread.join()
    assert turns
    for number in range(2):
        np.testing.assert_array_equal(
            got[number], [np.full((2, 4), (number + 1) * (3 * turn + 1)) for turn in range(20)]
        )


def test_several_devices(repository: Path) -> None:
    """A program on several devices asks once, one that each of them runs asks for each; JAX takes the outputs of both."""
    prepared.run_script(
        SEVERAL,
        str(repository),
        environment=os.environ | {"TENSORD_EXECUTABLES_CACHE_DIRECTORY": run_folder.programs()},
    )


def test_over_a_lane(repository: Path, tmp_path: Path) -> None:
    """Outputs that lie in the worker's memory are given back while JAX still has its own, and a daemon's end ends a run."""
    address = str(tmp_path / "clients.sock")
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(DaemonProcess(tmp_path, [repository], {"clients": {"socket": address}}))
        client = stack.enter_context(tensord_client.connect(address, patience=0))
        large, total = (tensord_client.jax(client.model(name)) for name in ("large", "total"))
        program, gradient = jax.jit(large), jax.jit(jax.grad(lambda x: total({"x": x})["y"].sum()))
        made = [program({"x": jnp.full(1, number, jnp.float32)})["y"] for number in range(100)]
        for number, array in enumerate(made):
            np.testing.assert_array_equal(array, np.full((1 << 16, 1), number))
        x = jnp.arange(8, dtype=jnp.float32).reshape(2, 4)
        np.testing.assert_array_equal(gradient(x), 2 * x)
        for process in daemon.everybody():
            process.kill()
        with pytest.raises(Exception, match="Unavailable: "):
            jax.block_until_ready(gradient(x))
    with pytest.raises(Exception, match="Unavailable: the client was closed"):
        jax.block_until_ready(gradient(x))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_dispatch(repository: Path, asynchronous: bool) -> None:
    """In a process whose JAX computes in the thread that asks, or in one of its own, while that thread goes on in Python."""
    script = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_cpu_enable_async_dispatch", sys.argv[2] == "True")
import tensord_client

with tensord_client.connect(Path(sys.argv[1])) as client:
    total = tensord_client.jax(client.model("total"))

    def descend(x):
        return jax.lax.scan(lambda x, _: (x - jax.grad(lambda x: total({"x": x})["y"].sum())(x) / 4, None), x, None, 20)[0]

    x, width = np.ones((3, 2, 4), np.float32), 1 << 10
    programs = [jax.jit(descend), jax.jit(jax.vmap(descend))]
    found = []
    for turn in range(10):
        # What is computed beside it is large enough for several threads.
        large = jnp.ones((width, width)) @ jnp.full((width, width), turn)
        found += [programs[0](x[0]), large, programs[1](x), large @ large]
        sum(range(10_000))
    for turn in range(10):
        one, large, many, _ = found[4 * turn : 4 * turn + 4]
        np.testing.assert_array_equal(one, x[0] / 2**20)
        np.testing.assert_array_equal(many, x / 2**20)
        assert large[0, 0] == width * turn
"""
    environment = os.environ | {"TENSORD_EXECUTABLES_CACHE_DIRECTORY": run_folder.programs()}
    prepared.run_script(script, str(repository), str(asynchronous), environment=environment)
