"""Models over several devices of their worker, here four of XLA:CPU: the answers are those of one device, bit for bit."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, tensorctl_status
from tests.repositories import ensemble, of_x, write_model
from tests.scrapes import scrape

#: Sums of whole numbers are the same in any order.
WEIGHTS = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

inputs = {"x": "FP32[16]"}
outputs = {"y": "FP32[8]", "sum": "FP32[1]"}
max_batch_size, batch_buckets = 8, (4, 8)

def weights():
    random = np.random.default_rng(0)
    return {name: random.integers(-8, 8, shape).astype(np.float32) for name, shape in
            {"w1": (16, 32), "w2": (32, 8), "unused": (3,)}.items()}

def mlp(params, x):
    return jnp.maximum(x @ params["w1"], 0) @ params["w2"]
"""
MODELS = {
    "one": """
def create(path, config, device):
    assert isinstance(device, jax.Device)
    return (lambda params, inputs: {"y": mlp(params, inputs["x"]), "sum": inputs["x"].sum(1, keepdims=True)}), weights()
""",
    # Parameters where their author puts them; XLA finds out the rest.
    "named": """
devices = 4

def create(path, config, devices):
    assert len(devices) == 4
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
    specs = {"w1": P(None, "model"), "w2": P("model", None), "unused": P()}
    placed = {name: jax.device_put(w, NamedSharding(mesh, specs[name])) for name, w in weights().items()}

    def apply(params, inputs):
        assert params["w1"].shape == (16, 32)
        return {"y": mlp(params, inputs["x"]), "sum": inputs["x"].sum(1, keepdims=True)}
    return apply, placed
""",
    # Parameters of numpy, inputs along the mesh: what the function says of them decides where they lie.
    "constrained": """
devices = 4

def create(path, config, devices):
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))

    def apply(params, inputs):
        x = jax.lax.with_sharding_constraint(inputs["x"], NamedSharding(mesh, P("data", None)))
        w1 = jax.lax.with_sharding_constraint(params["w1"], NamedSharding(mesh, P(None, "model")))
        return {"y": mlp({**params, "w1": w1}, x), "sum": x.sum(1, keepdims=True)}
    return apply, weights()
""",
    # A program for each device, with what they say to each other written out; on devices in an order of its own.
    "mapped": """
devices = 4

def create(path, config, devices):
    mesh = Mesh(np.array(devices[::-1]), ("model",))

    def part(w1, w2, x):
        return jax.lax.psum(jnp.maximum(x @ w1, 0) @ w2, "model")

    mapped = jax.shard_map(part, mesh=mesh, in_specs=(P(None, "model"), P("model", None), P()), out_specs=P())

    def apply(params, inputs):
        return {"y": mapped(params["w1"], params["w2"], inputs["x"]), "sum": inputs["x"].sum(1, keepdims=True)}
    return apply, weights()
""",
    # It says that it takes a pair, and does not care.
    "idle": """
devices = 2

def create(path, config, devices):
    assert len(devices) == 2
    return (lambda params, inputs: {"y": mlp(params, inputs["x"]), "sum": inputs["x"].sum(1, keepdims=True)}), weights()
""",
}
REFUSED = {
    "five": (
        "devices = 5\n" + MODELS["one"],
        "model 'five' runs on 5 devices, and its worker has 4 (workers.devices_per_worker)",
    ),
    "none": ("devices = 0\n" + MODELS["one"], "devices of model.py is 0, a number of devices from 1 is expected"),
    "huge": (
        """
devices = 4

def create(path, config, devices):
    mesh = Mesh(np.array(devices), ("model",))

    def apply(params, inputs):
        w = jax.lax.with_sharding_constraint(params["w"], NamedSharding(mesh, P("model")))
        return {"y": inputs["x"][:, :8] + w[0], "sum": inputs["x"][:, :1]}
    return apply, {"w": np.broadcast_to(np.float32(0), (1 << 44,))}
""",
        f"model 'huge': its parameters need {1 << 44} bytes on each of 4 devices, ",
    ),
    "huge_alone": (
        """
def create(path, config, device):
    return (lambda params, inputs: {"y": inputs["x"][:, :8] + params["w"][0], "sum": inputs["x"][:, :1]}), {
        "w": np.broadcast_to(np.float32(0), (1 << 44,))}
""",
        f"model 'huge_alone': its parameters need {1 << 46} bytes on ",
    ),
    "wide": (
        """
def create(path, config, device):
    def apply(params, inputs):
        return {"y": jnp.sort(jnp.sin(jax.lax.iota("float32", 1 << 36) * inputs["x"][0, 0]))[:8][None] + inputs["x"][:, :8],
                "sum": inputs["x"][:, :1]}
    return apply, None
""",
        "model 'wide': besides its parameters, its program for ",
    ),
}

#: Its state would be on one of them.
STATEFUL = """
import jax.numpy as jnp
inputs, outputs, devices = {"x": "FP32[1]"}, {"y": "FP32[1]"}, 2

def create(path, config, devices):
    return (lambda params, inputs, state: ({"y": state["n"]}, {"n": state["n"] + inputs["x"]})), None
"""
SEQUENCES = """
max_batch_size: 4
sequence_batching {
  state [ { input_name: "n" output_name: "n" data_type: TYPE_FP32 dims: [ 1 ] } ]
}
"""


#: One device, before and behind a model that has four.
DOUBLES = of_x("x * 2", "FP32[16]", more="max_batch_size = 8")


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("several")
    for name, source in (MODELS | {name: source for name, (source, _) in REFUSED.items()}).items():
        write_model(folder / "models", name, WEIGHTS + source)
    write_model(folder / "models", "state", STATEFUL, SEQUENCES)
    write_model(folder / "models", "doubles", DOUBLES)
    write_model(folder / "models", "eights", DOUBLES.replace("16", "8"))
    steps = [
        ("doubles", {"x": "x"}, {"y": "doubled"}),
        ("named", {"x": "doubled"}, {"y": "made", "sum": "sum"}),
        ("eights", {"x": "made"}, {"y": "y"}),
    ]
    ensemble(folder / "models", "crossing", ["x FP32 16"], ["y FP32 8", "sum FP32 1"], steps, 8)
    options = {
        # On the processor some have a device of their own, and "one" is on the first of those four.
        "workers": {"devices_per_worker": 4, "single_thread_flops": 4000},
        "repository": {"paths": [str(folder / "models")], "strict_readiness": False, "exit_on_error": False},
        "executables": {"cache_directory": str(folder / "cache")},
        "supervisor": {"control_socket": str(folder / "control.sock")},
        "expert": {"start_timeout": PATIENCE},
    }
    return daemon_of(folder / "models", options, folder=folder)


def ask(daemon: DaemonProcess, model: str, x: np.ndarray) -> dict[str, np.ndarray]:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
    status, answer = daemon.infer(model, [tensor])
    assert status == 200, answer
    return {one["name"]: np.array(one["data"], np.float32).reshape(one["shape"]) for one in answer["outputs"]}


@pytest.mark.parametrize("model", [name for name in MODELS if name != "one"])
def test_bit_for_bit_as_on_one_device(daemon: DaemonProcess, model: str) -> None:
    for rows in (1, 3, 4, 7, 8):
        x = np.random.default_rng(rows).integers(-9, 9, (rows, 16)).astype(np.float32)
        expected, got = ask(daemon, "one", x), ask(daemon, model, x)
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, strict=True)


def test_what_they_take_on_each_device(daemon: DaemonProcess) -> None:
    """Besides its part of the parameters, a device has eight rows in, and their outputs."""
    figures = scrape(daemon.metrics_url)
    for name in ("named", "mapped"):
        assert figures.value("tensord_model_parameter_bytes", model=name, version="1") == (16 * 32 + 32 * 8 + 3) * 4
        assert figures.value("tensord_model_largest_batch_bytes", model=name, version="1") >= 8 * (16 + 8 + 1) * 4


def test_an_ensemble_of_models_on_one_device_and_on_several(daemon: DaemonProcess) -> None:
    for rows in (1, 3, 8):
        x = np.random.default_rng(rows).integers(-9, 9, (rows, 16)).astype(np.float32)
        expected, got = ask(daemon, "one", 2 * x), ask(daemon, "crossing", x)
        np.testing.assert_array_equal(got["y"], 2 * expected["y"], strict=True)
        np.testing.assert_array_equal(got["sum"], expected["sum"], strict=True)


def test_models_take_turns_on_devices_that_they_share(daemon: DaemonProcess) -> None:
    """Each waits for parts on other devices, and none for another model's."""
    x = np.random.default_rng(0).integers(-9, 9, (4, 16)).astype(np.float32)
    expected = ask(daemon, "one", x)["y"]
    with ThreadPoolExecutor(6) as threads:
        for y in threads.map(lambda i: ask(daemon, [*MODELS][i % len(MODELS)], x)["y"], range(60)):
            np.testing.assert_array_equal(y, expected)


def test_what_cannot_be_is_said(daemon: DaemonProcess) -> None:
    reasons = {
        model["name"]: model["reason"] for model in tensorctl_status(daemon.folder / "control.sock")["not_served"]
    }
    assert reasons.keys() == {*REFUSED, "state"}
    for name, (_, words) in REFUSED.items():
        assert words in reasons[name]
    assert re.search(r" needs \d+ bytes on [^,]+, \d+ are left$", reasons["wide"])
    assert "model 'state': state is kept on one device" in reasons["state"]


def test_programs_come_from_the_cache(daemon: DaemonProcess) -> None:
    """Cached programs give the same results as compiled ones."""
    x = np.random.default_rng(1).integers(-9, 9, (4, 16)).astype(np.float32)
    before = {model: ask(daemon, model, x) for model in MODELS}
    daemon.workers[0].kill()
    for model in MODELS:
        daemon.wait_log(f"model '{model}' version 1: 0 executables compiled, 2 from the cache")
    daemon.wait_ready()
    for model, expected in before.items():
        for name, array in ask(daemon, model, x).items():
            np.testing.assert_array_equal(array, expected[name])
