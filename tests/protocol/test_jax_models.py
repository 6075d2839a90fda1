"""JAX models as people write them, and what they are told when one cannot be served."""

from __future__ import annotations

import concurrent.futures
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.daemon_process import DaemonOf, DaemonProcess, wait_until
from tests.repositories import of_x, write_model

BRANCHES = """
    inputs = {"x": "FP32[1]"}
    outputs = {"y": "FP32[1]"}

    def create(path, config, device):
        def apply(params, inputs):
            return {"y": inputs["x"] if inputs["x"][0] > 0 else -inputs["x"]}
        return apply, None
"""
WAITS = """
    import pathlib, time
    import numpy as np

    inputs = {{"x": "INT32[1]"}}
    outputs = {{"rows": "INT32[1]"}}
    max_batch_size = 4
    host = True

    def rows(values):
        if not values.any():
            pathlib.Path({folder!r}, "began").touch()
            while not pathlib.Path({folder!r}, "go").exists():
                time.sleep(0.01)
        return np.full(values.shape, len(values), np.int32)

    def create(path, config, device):
        return (lambda params, inputs: {{"rows": rows(inputs["x"])}}), None
"""

#: A pytree with leaves that are no arrays, as a model of Equinox is one.
NETWORK = """
    import dataclasses
    from typing import Any, Callable
    import jax
    import jax.numpy as jnp
    import numpy as np

    inputs = {"x": "FP32[2]"}
    outputs = {"y": "FP32[2]"}
    max_batch_size = 4

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Network:
        weight: Any
        bias: Any
        activation: Callable
        inference: bool
        rate: float
        name: str

        def __call__(self, x):
            x = self.activation(self.weight @ x + self.bias)
            if self.inference:
                return x
            return x / self.rate

    def create(path, config, device):
        network = Network(np.array([[1, 2], [3, -4]], np.float32), jnp.ones(2), jax.nn.relu, INFERENCE, 0.5, "n")

        def apply(network, inputs):
            return {"y": jax.vmap(network)(inputs["x"])}

        return apply, network
"""
#: Trees of inputs and outputs: a dataclass, tuples and dicts.
TREES = """
    import dataclasses
    from typing import Any
    import jax
    import jax.numpy as jnp

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Text:
        ids: Any
        mask: Any

    inputs = {"text": Text("INT32[length]", "INT32[length]"), "pair": ("FP32[2]", ["FP32[1]"])}
    outputs = {"scores": {"all": "FP32[2]", "text": "INT32[1]"}, "rest": ("FP32[1]",)}
    max_batch_size = 4
    buckets = {"length": (4,)}

    def create(path, config, device):
        def apply(params, inputs):
            text, (a, (b,)) = inputs["text"], inputs["pair"]
            found = jnp.sum(text.ids * text.mask, axis=1, keepdims=True)
            return {"scores": {"all": a * params["k"][0], "text": found}, "rest": (b,)}
        return apply, {"k": [jnp.float32(3)]}
"""
#: The same for a host model; and what one array is called.
SUM = """
    host = True
    inputs = ("FP32[2]", "FP32[2]")
    outputs = "FP32[2]"

    def create(path, config, device):
        return (lambda params, inputs: inputs[0] + inputs[1]), None
"""
EXPORTED = """
    import jax.export

    inputs = {"x": "FP32[3]"}
    outputs = {"y": "FP32[3]"}

    def create(path, config, device):
        exported = jax.export.deserialize(bytearray((path / "model.bin").read_bytes()))
        return (lambda params, inputs: {"y": exported.call(inputs["x"])}), None
"""
SEQUENCE = of_x("x", "FP32[sequence]", more='buckets = {"sequenze": (2, 4), "other": (1,)}')


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("jax")
    (folder / "models").mkdir()
    return daemon_of(folder / "models", {"repository": {"control_mode": "explicit"}}, folder=folder)


def load(daemon: DaemonProcess, name: str, source: str, config: str = "", **files: bytes) -> tuple[int, str]:
    folder = write_model(daemon.folder / "models", name, source, config)
    for file, content in files.items():
        Path(folder, file.replace("_", ".")).write_bytes(content)
    status, answer = daemon.request("POST", f"/v2/repository/models/{name}/load", b"{}")
    return status, json.loads(answer)["error"] if answer else ""


@pytest.mark.parametrize("inference", [True, False])
def test_a_network_with_functions_and_flags_among_its_leaves(daemon: DaemonProcess, inference: bool) -> None:
    assert load(daemon, "network", NETWORK.replace("INFERENCE", str(inference))) == (200, "")
    asked = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    status, answer = daemon.infer("network", [asked])
    assert (status, answer["outputs"][0]["data"]) == (200, [6.0, 0.0] if inference else [12.0, 0.0])


def tensor(name: str, datatype: str, data: list[list[float]] | list[float]) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": np.shape(data), "data": data}


def test_trees_of_inputs_and_outputs(daemon: DaemonProcess) -> None:
    """Clients name an array by the keys on the way to it."""
    assert load(daemon, "trees", TREES) == (200, "")
    asked = [tensor("text.ids", "INT32", [[1, 2, 3]]), tensor("text.mask", "INT32", [[1, 0, 1]])]
    asked += [tensor("pair.0", "FP32", [[1, 2]]), tensor("pair.1.0", "FP32", [[7]])]
    status, answer = daemon.infer("trees", asked)
    found = {output["name"]: output["data"] for output in answer["outputs"]}
    assert (status, found) == (200, {"scores.all": [3.0, 6.0], "scores.text": [4], "rest.0": [7.0]})
    assert load(daemon, "sum", SUM) == (200, "")
    status, answer = daemon.infer("sum", [tensor(f"input_{n}", "FP32", [n, 2]) for n in (0, 1)])
    assert (status, answer["outputs"][0]) == (200, tensor("output_0", "FP32", [1.0, 4.0]) | {"shape": [2]})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "slots = 4\n" + dedent(SUM).replace("host = True", ""),
            "inputs and outputs of a stepped model are dicts of names",
        ),
        (
            dedent(SUM).replace("inputs[0] + inputs[1])", "(yield inputs[0]))"),
            "whose inputs and outputs are dicts of names",
        ),
        (TREES.replace("class Text", "class Text_").replace("@jax", "#").replace("Text(", "Text_("), "is no pytree"),
    ],
)
def test_trees_that_are_refused(daemon: DaemonProcess, source: str, words: str) -> None:
    status, error = load(daemon, "refused", source)
    assert (status, words in error) == (400, True), error


def test_an_exported_program(daemon: DaemonProcess) -> None:
    pytest.importorskip("flatbuffers", reason="the environment was installed before the package asked for it")
    program = jax.export.export(jax.jit(lambda x: jnp.sin(x) + 1))(jax.ShapeDtypeStruct((3,), np.float32))
    assert load(daemon, "exported", EXPORTED, model_bin=bytes(program.serialize())) == (200, "")
    asked = {"name": "x", "datatype": "FP32", "shape": [3], "data": [0, 0, 0]}
    status, answer = daemon.infer("exported", [asked])
    assert (status, answer["outputs"][0]["data"]) == (200, [1.0, 1.0, 1.0])


def test_buckets_for_an_axis_that_is_not_there(daemon: DaemonProcess) -> None:
    status, error = load(daemon, "sequence", SEQUENCE)
    assert status == 400
    assert "model 'sequence': there are buckets for axis 'other', 'sequenze', which no input has" in error
    assert "they name 'sequence'" in error
    status, error = load(daemon, "sequence", SEQUENCE.replace("[sequence]", "[-1]"))
    assert "there are buckets for axis 'other', 'sequenze', which no input has: they name none" in error
    assert load(daemon, "sequence", SEQUENCE.replace("sequenze", "sequence").replace(', "other": (1,)', "")) == (
        200,
        "",
    )


def test_an_error_of_apply_keeps_its_links_and_tells_no_path(daemon: DaemonProcess) -> None:
    status, error = load(daemon, "branches", BRANCHES)
    assert status == 400
    assert re.search(
        r"See https://docs\.jax\.dev/en/latest/\S*errors\.html#jax\.errors\.TracerBoolConversionError", error
    )
    assert str(daemon.folder) not in error
    assert "/models/" not in error


def test_requests_that_wait_share_a_batch_without_being_configured_to(daemon: DaemonProcess) -> None:
    """1. one runs; 2. four wait; 3. they run together."""
    assert load(daemon, "waits", WAITS.format(folder=str(daemon.folder))) == (200, "")

    def ask(value: int) -> list[int]:
        asked = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [value]}
        return list(daemon.infer("waits", [asked])[1]["outputs"][0]["data"])

    def waiting() -> str:
        with urllib.request.urlopen(f"http://{daemon.metrics_url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        (found,) = [line for line in lines if line.startswith('nv_inference_pending_request_count{model="waits"')]
        return found.split()[-1]

    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        first = pool.submit(ask, 0)
        wait_until((daemon.folder / "began").exists, "the first request to run", daemon)
        others = [pool.submit(ask, value) for value in range(1, 5)]
        wait_until(lambda: waiting() in ("4", "4.0"), "four requests to wait", daemon)
        (daemon.folder / "go").touch()
        assert [asked.result() for asked in (first, *others)] == [[1], [4], [4], [4], [4]]
