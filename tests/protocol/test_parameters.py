"""Parameter sets of a real daemon, from outside: each way to push, what is listed, named sets, reverts, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tensord_client
import tritonclient.http as httpclient
from tensord_client import InvalidArgument, NotFound, Replaced
from tensord_client.parameters import layout

from tests.daemon_process import ROOT, DaemonOf, DaemonProcess
from tests.repositories import answering, applying, ensemble, fields, write_model

MODEL = applying(
    """
    ends = jnp.stack([params["a"][0], params["inner"]["b"][-1]])
    return {"y": jnp.concatenate([inputs["x"] * 0 + ends, inputs["x"]], axis=1)}
    """,
    "x FP32[1]",
    "y FP32[3]",
    more="max_batch_size = 8",
    params='{"a": jnp.zeros(1000), "inner": {"b": jnp.zeros(7)}}',
)


#: Asks "m" with the parameter set that its input names, and answers with its answer.
ASKS = applying(
    """
    name = inputs["set"][0, 0].decode()
    return tensord.models.call("m", {"x": inputs["x"]}, parameters={"parameter_set": name} if name else None)
    """,
    "x FP32[1], set BYTES[1]",
    "y FP32[3]",
    more="import tensord.models\nmax_batch_size = 8\nhost = True",
)
#: Asks "m" with all of its request's parameters.
PYTHON_ASKS = answering("""
    return pb_utils.InferenceRequest(
        model_name="m", inputs=request.inputs(), requested_output_names=["y"], parameters=request.parameters()
    ).exec()
""")
PYTHON_ASKS_CONFIG = fields("x FP32 1", "y FP32 3", "max_batch_size: 8")


#: ``create`` returns a tree with leaves of every kind: those that can be pushed, and those that stay what they are.
WHOLE = """
import equinox, jax, jax.numpy as jnp, typing
from flax import nnx

inputs, outputs = {"x": "FP32[2]"}, {"y": "FP32[2]"}
HOST

class State(typing.NamedTuple):
    step: typing.Any
    params: typing.Any

class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.dropout = nnx.Linear(2, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

def tree():
    layer = equinox.nn.MLP(2, 2, 2, 1, activation=jax.nn.relu, key=jax.random.key(0))
    return {
        "state": State(0, {"scale": jnp.ones(2)}),
        "layer": layer,
        "dropped": nnx.split(Dropped(nnx.Rngs(0)))[1],
        "key": jax.random.key(1),
        "packed": jnp.ones(2, jnp.int4),
        "bits": jnp.zeros(2, jnp.bfloat16),
        "name": "whole",
        "rate": 0.5,
        "training": False,
        "large": 1 << 70,
    }

def create(path, config, device):
    def apply(params, inputs):
        seed = jax.random.uniform(params["key"]) * 0
        flag = 100.0 if params["training"] else params["rate"] * params["packed"].astype("float32")
        return {"y": params["state"].params["scale"] * inputs["x"] + flag + params["bits"] + seed + params["state"].step}

    return apply, tree()
"""


def tree(a: float, b: float | None = None) -> dict[str, Any]:
    """Returns parameters with which answers begin with ``a`` and ``b``."""
    return {"a": np.full(1000, a, np.float32), "inner": {"b": np.full(7, a if b is None else b, np.float32)}}


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("parameters")
    write_model(folder / "models", "m", MODEL)
    write_model(folder / "models", "whole", WHOLE.replace("HOST", ""))
    write_model(folder / "models", "whole_host", WHOLE.replace("HOST", "host = True"))
    write_model(folder / "models", "asks", ASKS)
    write_model(folder / "models", "python_asks", PYTHON_ASKS, PYTHON_ASKS_CONFIG)
    step = ("python_asks", {"x": "x"}, {"y": "y"})
    ensemble(folder / "models", "pipeline", ["x FP32 1"], ["y FP32 3"], [step], max_batch_size=8)
    return daemon_of(
        folder / "models",
        {
            "workers": {"device": "cpu", "cpu": 2, "pin": False, "max_parameter_byte_size": 1 << 20},
            "clients": {"socket": str(folder / "clients.sock")},
            "supervisor": {"control_socket": str(folder / "control.sock")},
        },
        folder=folder,
    )


@pytest.fixture(params=["http", "lane"])
def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[tensord_client.Client]:
    """Yields a client over HTTP, or one with lanes."""
    where = daemon.url if request.param == "http" else str(daemon.folder / "clients.sock")
    with tensord_client.connect(where) as client:
        yield client


def asked(model: tensord_client.Model, times: int = 6) -> set[tuple[float, ...]]:
    """Sends several requests, so that all workers answer; returns the different beginnings of the answers."""
    answers = [model({"x": [[5.0]]}) for _ in range(times)]
    assert all(answer["y"][0, 2] == 5 for answer in answers)
    return {(float(answer["y"][0, 0]), float(answer["y"][0, 1])) for answer in answers}


def test_a_tree_is_pushed_and_every_worker_answers_with_it(client: tensord_client.Client) -> None:
    model = client.model("m", timeout=60)
    first = model.parameters.update(tree(3))
    assert asked(model) == {(3, 3)}
    number = model.parameters.update(tree(4), version=first + 5, check_finite=True)
    assert (number, asked(model)) == (first + 5, {(4, 4)})
    with pytest.raises(Replaced, match=f"number {first} of set 'main' of model 'm' is not newer than {number}"):
        model.parameters.update(tree(5), version=first)
    assert model.parameters.update({"inner": {"b": np.full(7, 9, np.float32)}}, partial=True) == number + 1
    assert asked(model) == {(4, 9)}
    (main,) = [each for each in model.parameters.list() if each["set"] == "main"]
    assert (main["number"], main["number_before"], main["kept"]) == (number + 1, number, "memory")
    assert model.parameters.roll_back() == number
    assert asked(model) == {(4, 4)}


@pytest.mark.parametrize("name", ["whole", "whole_host"])
def test_the_tree_that_create_returned_can_be_pushed(client: tensord_client.Client, name: str) -> None:
    """Functions, flags, static numbers and texts are part of the model's programs; random keys and int4 have no name in a push.

    All of them stay what they were, also where a learner has made arrays of them.
    """
    made: dict[str, Any] = {}
    exec(WHOLE.replace("HOST", ""), made)
    model, whole = client.model(name, timeout=60), made["tree"]()
    x = np.array([1, 2], np.float32)
    for scale, step in ((3, 0), (4, np.int32(17))):
        whole["state"] = made["State"](step, {"scale": np.full(2, scale, np.float32)})
        whole["bits"] = whole["bits"] + 1
        model.parameters.update(whole)
        for _ in range(6):
            np.testing.assert_array_equal(model({"x": x})["y"], scale * x + 0.5 + (scale - 2))
    model.parameters.update({"state": {"params": {"scale": np.full(2, 9, np.float32)}}}, partial=True)
    np.testing.assert_array_equal(model({"x": x})["y"], 9 * x + 0.5 + 2)
    for given, text in (
        ({"rate": np.zeros(3, np.float32)}, "leaf 'rate' is no array in model"),
        ({"key": np.zeros(2, np.uint32)}, "leaf 'key' is of key"),
        ({"key": made["jax"].random.key(0)}, "parameter 'key' is of key"),
        ({"name": "other"}, "parameter 'name' is of str"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            model.parameters.update(given, partial=True)
    del whole["layer"]
    with pytest.raises(InvalidArgument, match=r"leaf 'layer\.\S+' of model '\w+' is missing"):
        model.parameters.update(whole)


def test_the_answer_says_by_which_parameters_it_was_computed(client: tensord_client.Client) -> None:
    model = client.model("m", timeout=60)
    number = model.parameters.update(tree(6))
    answer = model({"x": [[1.0]]}, parameters={"tensord_parameters": True})
    assert answer.parameters["parameter_set"] == "main"
    assert answer.parameters["parameter_version"] == number
    assert "parameter_version" not in model({"x": [[1.0]]}).parameters


def test_named_sets(client: tensord_client.Client) -> None:
    model = client.model("m", timeout=60)
    model.parameters.update(tree(1))
    model.parameters.update(tree(7), set="customer-7")
    # What is not pushed is main's.
    model.parameters.update({"a": np.full(1000, 8, np.float32)}, set="customer-8", partial=True)
    for name, expected in (("customer-7", (7, 7)), ("customer-8", (8, 1))):
        assert asked(client.model("m", timeout=60, parameter_set=name)) == {expected}
    assert asked(model) == {(1, 1)}
    model.parameters.update(tree(2))
    assert asked(client.model("m", timeout=60, parameter_set="customer-8")) == {(8, 1)}
    for name in ("customer-7", "customer-8"):
        model.parameters.drop(name)
        with pytest.raises(NotFound, match=name):
            client.model("m", timeout=60, parameter_set=name)({"x": [[1.0]]})
    with pytest.raises(NotFound, match="no parameter set 'customer-7'"):
        model.parameters.drop("customer-7")


def test_models_name_sets_of_others(client: tensord_client.Client) -> None:
    """A Triton Python model finds the name among its request's parameters, and passes them on."""
    model = client.model("m", timeout=60)
    model.parameters.update(tree(3))
    model.parameters.update(tree(9), set="passed-on")
    x = np.array([[5]], np.float32)
    for name, expected in (("", 3), ("passed-on", 9)):
        answer = client.model("asks", timeout=60)({"x": x, "set": np.array([[name]])})
        assert answer["y"].tolist() == [[expected, expected, 5]]
        assert asked(client.model("python_asks", timeout=60, parameter_set=name)) == {(expected, expected)}
    with pytest.raises(tensord_client.ServingError, match="parameter set 'absent' of model 'm' is not found"):
        client.model("python_asks", timeout=60, parameter_set="absent")({"x": x})
    for given in (5, ""):
        with pytest.raises(InvalidArgument, match="the name of a parameter set is expected"):
            model({"x": x}, parameters={"parameter_set": given})
    model.parameters.drop("passed-on")


async def test_pushes_of_an_event_loop(daemon: DaemonProcess) -> None:
    async with await tensord_client.connect_async(daemon.folder / "clients.sock") as client:
        parameters = (await client.model("m")).parameters
        number = await parameters.update(tree(13), set="awaited")
        model = await client.model("m", parameter_set="awaited")
        assert (await model({"x": [[1.0]]}))["y"][0, 0] == 13
        assert await parameters.update(tree(14), set="awaited") == number + 1
        assert await parameters.roll_back("awaited") == number
        assert "awaited" in [each["set"] for each in await parameters.list()]
        await parameters.drop("awaited")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"a": np.zeros(1000, np.float32)}, "inner.b"),
        ({**tree(0), "more": np.zeros(1, np.float32)}, "more"),
        ({"a": np.zeros(999, np.float32), "inner": {"b": np.zeros(7, np.float32)}}, "999"),
        ({"a": np.zeros(1000, np.float64), "inner": {"b": np.zeros(7, np.float32)}}, "FP64|F64|float64"),
        (tree(float("nan")), "finite"),
    ],
)
def test_what_does_not_fit_changes_nothing(client: tensord_client.Client, bad: dict[str, Any], words: str) -> None:
    model = client.model("m", timeout=60)
    number = model.parameters.update(tree(11))
    with pytest.raises(InvalidArgument, match=words):
        model.parameters.update(bad, check_finite=True)
    assert asked(model) == {(11, 11)}
    (main,) = [each for each in model.parameters.list() if each["set"] == "main"]
    assert main["number"] == number


def push(daemon: DaemonProcess, fields: dict[str, Any], content: bytes = b"", name: str = "main") -> tuple[int, Any]:
    text = json.dumps(fields).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))} if content else {}
    status, body = daemon.request("POST", f"/v2/models/m/parameters/{name}", text + content, headers)
    return status, json.loads(body)


def test_a_body_with_its_checksum(daemon: DaemonProcess) -> None:
    content = b"".join(layout(tree(21)))
    status, answer = push(daemon, {"checksum": f"crc32:{zlib.crc32(content):08x}"}, content)
    assert (status, answer["byte_size"]) == (200, len(content)), answer
    status, answer = push(daemon, {"checksum": f"crc32:{zlib.crc32(content) ^ 1:08x}"}, content)
    assert (status, "crc32" in answer["error"]) == (400, True), answer
    with tensord_client.connect(daemon.url) as client:
        assert asked(client.model("m", timeout=60)) == {(21, 21)}


@pytest.mark.parametrize("name", ["pipeline", "python_asks"])
def test_what_has_no_parameters_has_no_sets(daemon: DaemonProcess, name: str) -> None:
    assert daemon.get(f"/v2/models/{name}/parameters") == (200, b"[]")
    status, answer = daemon.get(f"/v2/models/{name}/parameters/main")
    assert (status, json.loads(answer)["error"]) == (404, f"model '{name}' has no parameter set 'main'")
    assert name not in tensorctl(daemon, "parameters", "list").split()


@pytest.mark.parametrize("cut", [4, 8, 60, 2000])
def test_bodies_that_are_cut_or_hostile(daemon: DaemonProcess, cut: int) -> None:
    content = b"".join(layout(tree(0)))
    for body in (
        content[:cut],
        (1 << 62).to_bytes(8, "little") + content[8:],
        content[:8] + b"[" * 300 + content[308:],
    ):
        status, answer = push(daemon, {}, body)
        assert (status, bool(answer["error"])) == (400, True), answer
    status, answer = push(daemon, {}, bytes((1 << 20) + 1))
    assert (status, str(1 << 20) in answer["error"]) == (413, True)


def test_files_beside_the_model(daemon: DaemonProcess) -> None:
    folder = daemon.folder / "models" / "m"
    flat = {"a": tree(31)["a"], "inner.b": tree(31)["inner"]["b"]}
    safetensors.numpy.save_file(flat, folder / "1" / "params-31.safetensors")
    np.savez(folder / "params-32.npz", **{name: array + 1 for name, array in flat.items()})
    for name, value in (("params-31.safetensors", 31), ("params-32.npz", 32)):
        status, answer = push(daemon, {"file": name})
        assert status == 200, answer
        with tensord_client.connect(daemon.url) as client:
            assert asked(client.model("m", timeout=60)) == {(value, value)}
    (folder / "1" / "link.npz").symlink_to("/etc/passwd")
    for name in ("../../m/params-32.npz", "/etc/passwd", "link.npz", "nothing.npz"):
        status, answer = push(daemon, {"file": name})
        assert (status in (400, 404), "root:" in answer["error"]) == (True, False), answer
    pushed = tensorctl(daemon, "--json", "parameters", "push", "m", "params-31.safetensors", "--check-finite")
    assert json.loads(pushed)["set"] == "main"
    header, main, *_ = tensorctl(daemon, "parameters", "list", "m").splitlines()
    assert (header.split()[:4], "operator" in main) == (["model", "version", "set", "number"], True)
    back = tensorctl(daemon, "--json", "parameters", "roll-back", "m")
    assert json.loads(back)["number"] == json.loads(pushed)["number"] - 1
    said = f"parameters: m 1: main is number {json.loads(back)['number']}"
    assert said in tensorctl(daemon, "status")


def tensorctl(daemon: DaemonProcess, *words: str) -> str:
    """Runs tensorctl, which must succeed; returns its output."""
    command = [sys.executable, "-m", "tensord.daemon.ctl", "--socket", str(daemon.folder / "control.sock"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_a_region_and_leaves_in_it(daemon: DaemonProcess) -> None:
    content = b"".join(layout(tree(41)))
    key = f"tensord-test-{os.getpid()}"
    path = Path("/dev/shm", key)
    leaf = np.full(7, 42, np.float32).tobytes()
    path.write_bytes(content.ljust(8192, b"\0") + leaf)
    triton = httpclient.InferenceServerClient(daemon.url)
    try:
        triton.register_system_shared_memory("r", f"/{key}", path.stat().st_size)
        status, answer = push(daemon, {"region": "r", "byte_size": len(content)})
        assert status == 200, answer
        place = {"region": "r", "offset": 8192, "byte_size": 28, "datatype": "FP32", "shape": [7]}
        status, answer = push(daemon, {"leaves": {"inner.b": place}, "partial": True})
        assert status == 200, answer
        with tensord_client.connect(daemon.url) as client:
            assert asked(client.model("m", timeout=60)) == {(41, 42)}
        status, answer = push(daemon, {"region": "r", "offset": 8192})
        assert status == 400
        status, answer = push(daemon, {"region": "nothing"})
        assert (status in (400, 404), "nothing" in answer["error"]) == (True, True)
        triton.unregister_system_shared_memory("r")
    finally:
        path.unlink()
        triton.close()
