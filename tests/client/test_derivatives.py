"""Derivatives of served models, over every way that a client has, and what an operator sees of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensord_client
from tensord_client import parameters

from tensord import models, testing
from tests import prepared, run_folder
from tests.daemon_process import DaemonProcess, wait_until
from tests.repositories import ensemble, write_model

W = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
N = np.array([[2], [3]], np.int32)
COTANGENTS = np.linspace(0.5, 2, 6, dtype=np.float32).reshape(2, 3)


def rows(x: Any, w: Any = W) -> Any:
    return jnp.tanh(x @ w) * N


def energy(x: Any, w: Any = 2.0) -> Any:
    return jnp.sum(jnp.tanh(x * w))


def write_models(repository: Path) -> Path:
    write_model(
        repository,
        "rows",
        """
        import jax.numpy as jnp
        import numpy as np

        inputs, outputs = {"state": {"x": "FP32[4]", "n": "INT32[1]"}}, {"y": "FP32[3]", "k": "INT32[1]"}
        max_batch_size, derivatives = 64, 2

        def create(path, config, device):
            def apply(params, inputs):
                x, n = inputs["state"]["x"], inputs["state"]["n"]
                return {"y": params["f"](x @ params["w"]) * n, "k": n + 1}

            return apply, {"w": np.arange(12, dtype=np.float32).reshape(4, 3) / 10, "f": jnp.tanh}
        """,
    )
    write_model(
        repository,
        "energy",
        """
        import jax.numpy as jnp
        import numpy as np

        inputs, outputs, derivatives = {"x": "FP32[4]"}, {"e": "FP32[]"}, True

        def create(path, config, device):
            return (lambda w, inputs: {"e": jnp.sum(jnp.tanh(inputs["x"] * w))}), np.float32(2)
        """,
    )
    write_model(
        repository,
        "line",
        """
        import numpy as np

        inputs, outputs, derivatives, max_batch_size = {"x": "FP32[1]"}, {"y": "FP32[1]"}, True, 4

        def create(path, config, device):
            return (lambda params, inputs: {"y": params["w"] * inputs["x"]}), {"w": np.float32(3)}
        """,
    )
    write_model(
        repository,
        "root",
        """
        import jax.numpy as jnp

        inputs, outputs, derivatives, max_batch_size = {"x": "FP32[2]", "z": "FP32[1]"}, {"y": "FP32[1]"}, 2, 4

        def create(path, config, device):
            def apply(params, inputs):
                x, z = inputs["x"], inputs["z"]
                return {"y": jnp.where(x[:, :1] > 0, jnp.sqrt(x[:, :1]), 0) + x[:, 1:] ** 2 * z}

            return apply, {}
        """,
    )
    write_model(
        repository,
        "slashes",
        """
        inputs, outputs, derivatives = {"a": "FP32[2]", "b/c": "FP32[2]"}, {"y/z": "FP32[]"}, 2

        def create(path, config, device):
            return (lambda params, inputs: {"y/z": (inputs["a"] * inputs["b/c"] ** 2).sum()}), {}
        """,
    )
    write_model(
        repository,
        "mixed",
        """
        import jax

        inputs, outputs, max_batch_size, derivatives = {"x": "FP32[4]"}, {"y": "FP32[4]"}, 4, True

        @jax.custom_vjp
        def square(x):
            return x * x

        square.defvjp(lambda x: (square(x), x), lambda x, ct: (2 * x * ct.mean(0),))

        def create(path, config, device):
            return (lambda params, inputs: {"y": square(inputs["x"])}), {}
        """,
    )
    write_model(
        repository,
        "plain",
        """
        inputs, outputs, max_batch_size = {"x": "FP32[4]"}, {"y": "FP32[4]"}, 4

        def create(path, config, device):
            return (lambda params, inputs: {"y": 2 * inputs["x"]}), {}
        """,
    )
    return repository


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def daemon(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    options = {
        "clients": {"socket": str(folder / "clients.sock")},
        "workers": {"cpu": 2},
        "repository": {"control_mode": "explicit", "load": ["*"]},
    }
    with DaemonProcess(folder, [repository], options) as daemon:
        yield daemon


@pytest.fixture(scope="module", params=["testing", "http", "lane"])
def model(request: pytest.FixtureRequest, repository: Path) -> Iterator[Any]:
    """Yields a function that looks up a model, on each way that a client has."""
    if request.param == "testing":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())
            names = ("rows", "energy", "root", "plain", "slashes", "mixed")
            loaded = {name: testing.load(repository / name) for name in names}
            yield loaded.__getitem__
            for each in loaded.values():
                each.close()
        return
    daemon: DaemonProcess = request.getfixturevalue("daemon")
    address = daemon.url if request.param == "http" else daemon.sections["clients"]["socket"]
    with tensord_client.connect(address) as client:
        yield client.model


def root(x: Any, z: Any = N) -> Any:
    return jnp.where(x[:, :1] > 0, jnp.sqrt(x[:, :1]), 0) + x[:, 1:] ** 2 * z


def close(got: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.shape(one) == np.shape(other)
        # Where tanh is almost 1, one minus its square keeps few digits, other ones on each kind of processor.
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_products_with_numpy(model: Any) -> None:
    served, inputs = model("rows"), {"state": {"x": X, "n": N}}
    value, pull = jax.vjp(jax.jit(rows), X)
    close(served(inputs)["y"], value)
    close(dict(served.pull_back(inputs, {"y": COTANGENTS})), {"state.x": pull(COTANGENTS)[0]})
    close(dict(served.push_forward(inputs, {"state.x": 2 * X})), {"y": jax.jvp(rows, (X,), (2 * X,))[1]})
    by_w = served.derivative("parameter_gradient")({"state.x": X, "state.n": N, "cotangent.y": COTANGENTS})
    close(dict(by_w), {"w": jax.vjp(lambda w: rows(X, w), W)[1](COTANGENTS)[0]})
    with pytest.raises(Exception, match="model 'rows' has no value_and_gradient: it takes exactly one floating output"):
        served.value_and_gradient(inputs)


def test_value_and_gradient_of_a_model_without_a_batch(model: Any) -> None:
    served = model("energy")
    value, gradient = served.value_and_gradient({"x": X[0]})
    close((value["e"], gradient["x"]), jax.value_and_grad(energy)(X[0]))
    close(dict(served.pull_back({"x": X[1]}, {"e": 2.0})), {"x": 2 * jax.grad(energy)(X[1])})
    assert served.derivative("pull_back").inputs["cotangent.e"].shape == (-1,)
    by_w = served.derivative("parameter_gradient")({"x": X[0], "cotangent.e": np.float32(1)})
    close(dict(by_w), {"array": jax.grad(lambda w: energy(X[0], w))(2.0)})


def transformed(function: Any) -> dict[str, Any]:
    """Returns programs that differentiate ``function``, by name."""

    def loss(x: Any) -> Any:
        return jnp.sum(function(x) ** 2)

    def rolled(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c + 0.1 * jnp.sum(function(c)), loss(c)), x, None, 3)[1].sum()

    def moved(x: Any) -> Any:
        points = jnp.stack([jnp.ones_like(x), jnp.full_like(x, 0.3)])
        return jnp.sum(jax.vmap(lambda point: jax.jvp(function, (point,), (x,))[1])(points) ** 2)

    return {
        "grad by a tangent that vmap does not map": jax.grad(moved),
        "grad": jax.grad(loss),
        "value_and_grad": jax.value_and_grad(loss),
        "jvp": lambda x: jax.jvp(function, (x,), (2 * x,)),
        "jacrev": jax.jacrev(function),
        "jacfwd": jax.jacfwd(function),
        "vmap of grad": lambda x: jax.vmap(jax.grad(loss))(jnp.stack([x, 2 * x, 3 * x])),
        "vmap of jvp": lambda x: jax.vmap(lambda d: jax.jvp(function, (x,), (d,))[1])(jnp.stack([x, 2 * x])),
        "scan": jax.grad(rolled),
        "checkpoint": jax.grad(jax.checkpoint(loss)),
    }


def twice(function: Any) -> dict[str, Any]:
    def loss(x: Any) -> Any:
        return jnp.sum(function(x) ** 2)

    return {
        "jvp of grad": lambda x: jax.jvp(jax.grad(loss), (x,), (2 * x,)),
        "hessian": jax.hessian(loss),
        "grad of grad": jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)),
        "jvp of jvp": lambda x: jax.jvp(lambda x: jax.jvp(function, (x,), (x,))[1], (x,), (2 * x,)),
        "jacrev of jacrev": jax.jacrev(jax.jacrev(function)),
    }


def test_programs_of_jax(model: Any) -> None:
    call = tensord_client.jax(model("rows"))

    def ours(x: Any) -> Any:
        return call({"state": {"x": x, "n": N}})["y"]

    found, wanted = transformed(ours) | twice(ours), transformed(rows) | twice(rows)
    for name, program in found.items():
        right = jax.jit(wanted[name])(X)
        close(program(X), right)
        close(jax.jit(program)(X), right)
    many = np.stack([N, 2 * N, 3 * N])

    def total(function: Any, x: Any) -> Any:
        return jnp.sum(jax.vmap(lambda n: function(x, n))(many) ** 2)

    got = jax.jit(jax.grad(lambda x: total(lambda x, n: call({"state": {"x": x, "n": n}})["y"], x)))(X)
    close(got, jax.grad(lambda x: total(lambda x, n: jnp.tanh(x @ W) * n, x))(X))


def test_programs_of_jax_and_a_model_without_a_batch(model: Any) -> None:
    call = tensord_client.jax(model("energy"))
    wanted = transformed(energy)
    for name, program in transformed(lambda x: call({"x": x})["e"]).items():
        right = jax.jit(wanted[name])(X[0])
        close(program(X[0]), right)
        close(jax.jit(program)(X[0]), right)


def test_forwards_of_a_model_with_one_output(model: Any) -> None:
    """Where the gradient is not a number the tangent may be one, and it has derivatives of its own."""
    call = tensord_client.jax(model("root"))

    def ours(x: Any, z: Any = N) -> Any:
        return call({"x": x, "z": jnp.asarray(z, jnp.float32)})["y"]

    x = np.array([[-1, 2], [3, -4]], np.float32)
    found, wanted = transformed(ours), transformed(root)
    for name in ("jvp", "jacfwd", "vmap of jvp"):
        right = wanted[name](x)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(right)), name
        close(found[name](x), right)
        close(jax.jit(found[name])(x), right)
    close(jax.linearize(ours, x)[1](x), jax.jvp(root, (x,), (x,))[1])
    many = np.stack([N, 2 * N]).astype(np.float32)

    def mapped(function: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jax.vmap(lambda z: function(x, z))(many) ** 2))

    positive = np.abs(x)
    wanted = twice(root) | {"mapped": mapped(root)}
    for name, program in (twice(ours) | {"mapped": mapped(ours)}).items():
        close(jax.jit(program)(positive), wanted[name](positive))


def test_a_gradient_with_its_value_is_one_request(daemon: DaemonProcess) -> None:
    with tensord_client.connect(daemon.sections["clients"]["socket"]) as client:
        call = tensord_client.jax(client.model("root"))

        def total(x: Any) -> Any:
            return call({"x": x, "z": jnp.ones((2, 1))})["y"].sum()

        def counts() -> list[int]:
            names = ("root", "root.value_and_gradient", "root.pull_back", "root.push_forward")
            return [requests(daemon, name) for name in names]

        x = np.ones((2, 2), np.float32)
        for program in (jax.value_and_grad(total), jax.jit(jax.value_and_grad(total)), jax.jit(jax.grad(total))):
            before = counts()
            jax.block_until_ready(program(x))
            assert np.subtract(counts(), before).tolist() == [0, 1, 0, 0]
        before = counts()
        jax.block_until_ready(jax.jvp(total, (x,), (x,)))
        assert np.subtract(counts(), before).tolist() == [0, 1, 0, 1]


def requests(daemon: DaemonProcess, model: str) -> int:
    status, body = daemon.get(f"/v2/models/{model}/stats")
    assert status == 200
    found: int = json.loads(body)["model_stats"][0]["execution_count"]
    return found


def test_trees_and_integers(model: Any) -> None:
    call = tensord_client.jax(model("rows"))

    def loss(tree: Any) -> Any:
        return call({"state": tree})["y"].sum()

    found = jax.jit(jax.grad(loss, allow_int=True))({"x": X, "n": N})
    close(found["x"], jax.grad(lambda x: rows(x).sum())(X))
    assert found["n"].dtype == jax.dtypes.float0
    assert found["n"].shape == N.shape


def test_what_a_model_lacks_is_said_when_a_program_is_traced(model: Any) -> None:
    plain, energies = tensord_client.jax(model("plain")), tensord_client.jax(model("energy"))
    with pytest.raises(Exception, match=r"model 'plain' has no pull_back: .*has to say derivatives = True"):
        jax.jit(jax.grad(lambda x: plain({"x": x})["y"].sum())).lower(X)
    with pytest.raises(Exception, match=r"model 'energy.value_and_gradient' has no pull_back: .*derivatives = 2"):
        jax.jit(jax.hessian(lambda x: energies({"x": x})["e"])).lower(X[0])
    mixed = tensord_client.jax(model("mixed"))
    with pytest.raises(Exception, match=r"model 'mixed' has no push_forward: TypeError: can't apply forward-mode"):
        jax.jit(lambda x: jax.jvp(lambda x: mixed({"x": x})["y"], (x,), (x,))).lower(X)


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        (
            "plain",
            "pull_back",
            "the model.py of 'plain' has to say derivatives = True, or its program to be exported w",
        ),
        ("mixed", "push_forward", "TypeError: can't apply forward-mode autodiff (jvp) to a custom_vjp function."),
        ("mixed", "value_and_gradient", "it takes exactly one floating output, of one element in each row"),
        ("mixed", "parameter_gradient", "it has no floating parameters"),
        (
            "mixed.pull_back",
            "pull_back",
            "the model.py of 'mixed' has to say derivatives = 2, or its program to be exp",
        ),
        (
            "slashes",
            "hessian",
            "the kinds of derivatives are pull_back, push_forward, value_and_gradient, parameter_grad",
        ),
        ("slashes.pull_back", "value_and_gradient", "it takes exactly one floating output, of one element in each row"),
        ("slashes.pull_back", "parameter_gradient", "gradients by the parameters are of models alone"),
        ("slashes.pull_back.pull_back", "pull_back", "a model has at most 2 orders of derivatives"),
    ],
)
def test_why_a_derivative_is_not_there_is_said(model: Any, name: str, kind: str, why: str) -> None:
    first, *kinds = name.split(".")
    served = model(first)
    for each in kinds:
        served = served.derivative(each)
    with pytest.raises(Exception, match=re.escape(f"model '{name}' has no {kind}: {why}")) as caught:
        served.derivative(kind)
    assert type(caught.value).__name__ == "InvalidArgument"


def test_a_rule_that_mixes_rows_is_refused_for_one_row_too(model: Any) -> None:
    """The values of rows are apart, and their derivatives are not: whatever the batch, each request gets the same sentence."""
    served, said = model("mixed"), set()
    for x in (X[:1], X, X[:1]):
        with pytest.raises(
            Exception, match=r"model 'mixed\.pull_back': a row of output 'cotangent\.x' depends on"
        ) as caught:
            served.pull_back({"x": x}, {"y": x})
        said.add(str(caught.value))
    assert len(said) == 1
    # What it would need is no other setting, which a load with derivatives refuses.
    assert "of one row, mapped over the rows by jax.vmap" in said.pop()
    np.testing.assert_array_equal(served({"x": X})["y"], X * X)


def test_names_with_slashes(model: Any) -> None:
    served, a, c = model("slashes"), X[0, :2], X[1, 2:]
    wanted = {"a": c**2, "b/c": 2 * a * c}
    for inputs in ({"a": a, "b/c": c}, {"a": a, "b": {"c": c}}):
        close(dict(served.pull_back(inputs, {"y": {"z": 1.0}})), wanted)
        close(dict(served.value_and_gradient(inputs)[1]), wanted)
        close(dict(served.push_forward(inputs, inputs)), {"y/z": 3 * np.sum(a * c**2)})
    call = tensord_client.jax(served)
    found = jax.jit(jax.grad(lambda tree: call(tree)["y/z"]))({"a": a, "b": {"c": c}})
    close((found["a"], found["b"]["c"]), (wanted["a"], wanted["b/c"]))


def test_bad_cotangents(model: Any) -> None:
    served, inputs = model("rows"), {"state": {"x": X, "n": N}}
    for cotangents, text in (
        ({"y": COTANGENTS[:1]}, "batch size does not match"),
        ({"y": COTANGENTS[:, :2]}, r"cotangent\.y.*shape|shape.*cotangent\.y"),
        ({"y": COTANGENTS.astype(np.float64)}, r"cotangent\.y.*FP64|FP64.*cotangent\.y"),
        ({}, r"the cotangent of 'y' is missing: those of \['y'\] are expected"),
        ({"y": COTANGENTS, "k": N}, r"the cotangent of 'k' is not known: those of \['y'\] are expected"),
        ([COTANGENTS], "cotangents are list, a mapping of names to arrays is expected"),
        ({"y": "text"}, "input 'cotangent.y' cannot be an array of FP32"),
    ):
        with pytest.raises(Exception, match=text):
            served.pull_back(inputs, cotangents)
    for tangents, text in (
        ({}, r"the tangent of 'state.x' is missing: those of \['state.x'\] are expected"),
        ({"state": {"x": X, "n": N}}, r"the tangent of 'state.n' is not known: those of \['state.x'\] are expected"),
    ):
        with pytest.raises(Exception, match=text):
            served.push_forward(inputs, tangents)
    # What is not a number is a number to JAX.
    found = served.pull_back(inputs, {"y": np.full((2, 3), np.nan, np.float32)})["state.x"]
    assert np.isnan(found).all()


def test_inputs_too_many_or_too_few_on_the_wire(daemon: DaemonProcess) -> None:
    x, y, z = ({"name": name, "datatype": "FP32", "shape": [1, 1], "data": [1]} for name in ("x", "cotangent.y", "z"))
    for given, fault in (
        ([x, y, z], "but the model takes ['x','cotangent.y']."),
        ([x], "but missing required input(s) ['cotangent.y']. Please provide all required input(s)."),
    ):
        status, answer = daemon.infer("line.pull_back", given)
        assert (status, answer["error"].endswith(fault)) == (400, True), answer


def test_an_awaited_model(daemon: DaemonProcess) -> None:
    async def ask() -> Any:
        async with await tensord_client.connect_async(daemon.sections["clients"]["socket"]) as client:
            served = await client.model("energy")
            value, gradient = await served.value_and_gradient({"x": X[0]})
            pulled = await served.pull_back({"x": X[0]}, {"e": 1.0})
            pushed = await served.push_forward({"x": X[0]}, {"x": X[0]})
            return value["e"], gradient["x"], pulled["x"], pushed["e"]

    value, gradient = jax.value_and_grad(energy)(X[0])
    close(asyncio.run(ask()), (value, gradient, gradient, gradient @ X[0]))


def test_rows_of_cotangents_share_a_request(daemon: DaemonProcess) -> None:
    with tensord_client.connect(daemon.sections["clients"]["socket"]) as client:
        served = client.model("rows")
        gradient = tensord_client.jax(served)
        x, n = X[:1], N[:1]
        before = counted(daemon, "rows.pull_back")
        jax.jacrev(lambda x: gradient({"state": {"x": x, "n": n}})["y"])(jnp.asarray(x))
        assert counted(daemon, "rows.pull_back") == before + 1


def counted(daemon: DaemonProcess, model: str) -> int:
    status, body = daemon.get(f"/v2/models/{model}/stats")
    assert status == 200
    found: int = json.loads(body)["model_stats"][0]["inference_count"]
    return found // 3  # rows of three cotangents


def test_what_operators_see(daemon: DaemonProcess) -> None:
    """Derivatives have metadata, a configuration and statistics, are in the index and in metrics, and share all else."""
    metadata = json.loads(daemon.get("/v2/models/rows.pull_back")[1])
    assert [each["name"] for each in metadata["inputs"]] == ["state.n", "state.x", "cotangent.y"]
    assert metadata["outputs"] == [{"name": "cotangent.state.x", "datatype": "FP32", "shape": [-1, 4]}]
    assert metadata["versions"] == ["1"]
    assert json.loads(daemon.get("/v2/models/rows.pull_back/config")[1])["max_batch_size"] == 64
    assert daemon.get("/v2/models/rows.pull_back/ready")[0] == 200
    index = json.loads(daemon.request("POST", "/v2/repository/index", b"{}")[1])
    assert {"name": "energy.push_forward", "version": "1", "state": "READY"} in index
    assert not [entry for entry in index if entry["name"].startswith("plain.")]
    given = [
        {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": X.ravel().tolist()},
        {"name": "cotangent.e", "datatype": "FP32", "shape": [2], "data": [1, 1]},
    ]
    status, answer = daemon.infer("energy.pull_back", given)
    assert status == 200
    close(np.reshape(answer["outputs"][0]["data"], (2, 4)), jax.vmap(jax.grad(energy))(X))
    with urllib.request.urlopen(f"http://{daemon.metrics_url}/metrics") as found:
        lines = found.read().decode().splitlines()
    assert any('model="energy.pull_back"' in line for line in lines)
    # What they share is counted once.
    shared = [line for line in lines if line.startswith("tensord_parameter_device_bytes{")]
    assert any('model="energy"' in line for line in shared)
    assert not any('model="energy.' in line for line in shared)
    for path in ("repository/models/rows.pull_back/load", "repository/models/rows.pull_back/unload"):
        status, body = daemon.request("POST", f"/v2/{path}", b"{}")
        assert status == 400
        assert b"'rows.pull_back' is a derivative of model 'rows'" in body
    status, body = daemon.request("POST", "/v2/models/rows.pull_back/parameters/main", b'{"file": "w.npz"}')
    assert status == 400
    assert b"ask for that" in body
    assert daemon.get("/v2/models/plain.pull_back")[0] == 404


def test_a_folder_with_the_name_of_a_derivative(daemon: DaemonProcess, repository: Path) -> None:
    """It is refused whether there is such a derivative or not, and the index has its state and the reason."""
    for name in ("rows.pull_back", "other.push_forward"):
        shutil.copytree(repository / "plain", repository / name)
        status, body = daemon.request("POST", f"/v2/repository/models/{name}/load", b"{}")
        assert (status, b"(a model's folder needs another name)" in body) == (400, True), body
        entries = json.loads(daemon.request("POST", "/v2/repository/index", b"{}")[1])
        (refused,) = (each for each in entries if each["name"] == name and each.get("state") != "READY")
        kind = name.partition(".")[2]
        assert refused["state"] == "UNAVAILABLE"
        assert refused["reason"] == f"its name must not end in .{kind}, as the names of models' derivatives do"
        shutil.rmtree(repository / name)
    assert daemon.get("/v2/models/rows.pull_back/ready")[0] == 200


def test_value_and_gradient_are_of_one_parameter_set(daemon: DaemonProcess) -> None:
    with tensord_client.connect(daemon.sections["clients"]["socket"]) as client:
        served, over, pushed = client.model("line"), threading.Event(), 0
        x = np.array([[2.0]], np.float32)

        def push() -> None:
            nonlocal pushed
            while not over.is_set():
                served.parameters.update({"w": np.float32(pushed + 1)})
                pushed += 1

        pusher = threading.Thread(target=push)
        pusher.start()
        seen = set()
        try:
            while len(seen) < 5 and pusher.is_alive():
                value, gradient = served.value_and_gradient({"x": x})
                assert value["y"] == gradient["x"] * x
                seen.add(float(gradient["x"][0, 0]))
        finally:
            over.set()
            pusher.join()
        assert len(seen) == 5
        # Whoever knows that a push was answered gets its derivatives.
        assert served.pull_back({"x": x}, {"y": x})["x"] == pushed * 2
        served.parameters.update({"w": np.float32(5)}, set="other")
        assert client.model("line", parameter_set="other").pull_back({"x": x}, {"y": x})["x"] == 5 * 2


def test_a_step_of_an_ensemble(
    daemon: DaemonProcess, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of an ensemble may be a derivative, also beside its model. One that the model lacks is named in the error."""
    for name, derivative in (("squared", ".pull_back"), ("lacking", ".value_and_gradient.pull_back")):
        pulled = f"line{derivative}", {"x": "x", "cotangent.y": "y"}, {"cotangent.x": "g"}
        ensemble(repository, name, ["x FP32 1"], ["g FP32 1"], [("line", {"x": "x"}, {"y": "y"}), pulled], 4)
    x, lacks = np.array([[2], [5]], np.float32), "model 'line.value_and_gradient' has no pull_back: "
    assert daemon.request("POST", "/v2/repository/models/squared/load", b"{}")[0] == 200
    with tensord_client.connect(daemon.url) as client:
        client.model("line").parameters.update({"w": np.float32(4)})
        np.testing.assert_array_equal(client.model("squared")({"x": x})["g"], 16 * x)
    code, answer = daemon.request("POST", "/v2/repository/models/lacking/load", b"{}")
    assert (code, lacks.encode() in answer) == (400, True), answer
    for name in ("squared", "lacking"):
        assert daemon.request("POST", f"/v2/repository/models/{name}/unload", b"{}")[0] == 200
    monkeypatch.setenv("TENSORD_EXECUTABLES_CACHE_DIRECTORY", run_folder.programs())
    with testing.load(repository / "squared") as model:
        np.testing.assert_array_equal(model({"x": x})["g"], 9 * x)
    with pytest.raises(testing.ServingError, match=lacks):
        testing.load(repository / "lacking").close()
    for name in ("line", "squared", "lacking"):
        shutil.copytree(repository / name, tmp_path / name)
    checked = prepared.run(["tensord", "check", f"--model-repository={tmp_path}", "--device=cpu"])
    assert "squared: version 1" in checked.stdout, checked
    assert f"lacking: {lacks}" in checked.stdout + checked.stderr


def test_a_killed_worker_fails_no_gradient(daemon: DaemonProcess) -> None:
    with tensord_client.connect(daemon.sections["clients"]["socket"]) as client:
        served, over, asked = client.model("rows"), threading.Event(), []

        def ask() -> None:
            while not over.is_set():
                asked.append(served.pull_back({"state": {"x": X, "n": N}}, {"y": COTANGENTS})["state.x"])

        asker = threading.Thread(target=ask)
        asker.start()
        for _ in range(2):
            before = {worker.pid for worker in daemon.workers}
            os.kill(min(before), signal.SIGKILL)
            wait_until(lambda: len({w.pid for w in daemon.workers} - before) == 1, "another worker", daemon)  # noqa: B023
            count = len(asked)
            wait_until(lambda: len(asked) > count or not asker.is_alive(), "an answer", daemon)  # noqa: B023
        over.set()
        asker.join()
    wanted = jax.vjp(rows, X)[1](COTANGENTS)[0]
    for found in asked:
        close(found, wanted)


def test_an_exported_model_takes_its_own_file_again(daemon: DaemonProcess, repository: Path) -> None:
    """What is written into the file counts when it is pushed, for values and derivatives at once, and not before."""

    def apply(params: Any, inputs: Any) -> Any:
        return {"y": params["w"] * inputs["x"]}

    models.export(
        repository / "carried", apply, {"w": np.float32(3)}, {"x": "FP32[1]"}, max_batch_size=4, derivatives=1
    )
    (file,) = (repository / "carried/1").glob("params.*")
    assert daemon.request("POST", "/v2/repository/models/carried/load", b"{}")[0] == 200
    x = np.array([[2.0], [3.0]], np.float32)
    for address, first in ((daemon.url, 3), (daemon.sections["clients"]["socket"], 5)):
        with tensord_client.connect(address) as client:
            served = client.model("carried")
            for before, w in ((first, first + 1), (first + 1, first + 2)):
                # In place: nothing that serves may lie in the file.
                file.write_bytes(b"".join(parameters.layout({"w": np.float32(w)})))
                for pushed in (before, w):
                    assert (served({"x": x})["y"] == pushed * x).all()
                    assert (served.pull_back({"x": x}, {"y": x})["x"] == pushed * x).all()
                    if pushed == before:
                        served.parameters.update(file.name)
            assert served.parameters.gradient({"x": x}, {"y": x})["w"] == np.sum(x * x)
    assert daemon.request("POST", "/v2/repository/models/carried/unload", b"{}")[0] == 200


def test_a_learner_without_a_model_of_its_own(daemon: DaemonProcess) -> None:
    """Steps along the gradient that the server computes fit a line; what is pushed counts for the next gradient."""
    with tensord_client.connect(daemon.sections["clients"]["socket"]) as client:
        served = client.model("line")
        x, w = np.arange(4, dtype=np.float32)[:, None], np.float32(1)
        for _ in range(20):
            served.parameters.update({"w": w})
            found = served.parameters.gradient({"x": x}, {"y": (served({"x": x})["y"] - 7 * x) / 14})
            w = np.float32(w - 0.9 * found["w"])
        assert abs(w - 7) < 1e-4

    async def gradient() -> Any:
        async with await tensord_client.connect_async(daemon.url) as client:
            return await (await client.model("energy")).parameters.gradient({"x": X[0]}, {"e": 1.0})

    close(asyncio.run(gradient()), jax.grad(lambda w: energy(X[0], w))(2.0))


def test_a_reload_and_an_unload_take_derivatives_along(daemon: DaemonProcess, repository: Path) -> None:
    with tensord_client.connect(daemon.url) as client:
        assert client.model("line").derivative("pull_back")
        file = repository / "line/1/model.py"
        file.write_text(
            file.read_text().replace('params["w"] * inputs["x"]', 'inputs["x"] * inputs["x"] * params["w"]')
        )
        assert daemon.request("POST", "/v2/repository/models/line/load", b"{}")[0] == 200
        x = np.array([[2.0]], np.float32)
        assert client.model("line").pull_back({"x": x}, {"y": x})["x"] == 2 * 2 * 3 * 2
        file.write_text(file.read_text().replace("derivatives, max_batch_size", "_, max_batch_size"))
        assert daemon.request("POST", "/v2/repository/models/line/load", b"{}")[0] == 200
        assert daemon.get("/v2/models/line.pull_back")[0] == 404
        assert daemon.request("POST", "/v2/repository/models/energy/unload", b"{}")[0] == 200
        wait_until(lambda: daemon.get("/v2/models/energy.pull_back")[0] == 404, "the derivative to be gone", daemon)
