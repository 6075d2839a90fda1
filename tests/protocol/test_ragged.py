"""Ragged batching as clients meet it: requests of different lengths, many at a time, each answered as if it were alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.daemon_process import ROOT, DaemonOf, DaemonProcess
from tests.repositories import of_x, write_model

#: They come together, so that there is something to be batched.
DELAY = "dynamic_batching { max_queue_delay_microseconds: 20000 }"
#: Every kind of batch input, as a sum of each request (of one row) that is found by it, or as what it says of each row.
KINDS = """
    import jax.numpy as jnp

    inputs = {"x": "INT32[length]", "w": "INT32[1]"}
    outputs = {name: "INT32[1]" for name in ("counts", "ends", "bounds", "most", "items", "flat", "segments", "twice")}
    outputs |= {"each": "INT32[length]"}
    max_batch_size = 16
    buckets = {"length": (8, 32, 64)}
    ragged = ["x"]
    batch_inputs = {
        "in_counts": ("BATCH_ELEMENT_COUNT", "FP32", "x"),
        "in_ends": ("BATCH_ACCUMULATED_ELEMENT_COUNT", "INT32", "x"),
        "in_bounds": ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "INT32", "x"),
        "in_most": ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "INT32", "x"),
        "in_items": ("BATCH_ITEM_SHAPE", "INT32", "x"),
        "in_flat": ("BATCH_ITEM_SHAPE_FLATTEN", "FP32", "x"),
        "in_segments": ("SEGMENT_IDS", "INT32", "x"),
    }
    batch_outputs = {"each": "x"}


    def create(path, config, device):
        def apply(params, inputs):
            x, rows = inputs["x"], inputs["w"].shape[0]
            sums = jnp.concatenate([jnp.zeros(1, x.dtype), jnp.cumsum(x)])
            ends, bounds = inputs["in_ends"], inputs["in_bounds"]
            # Of those that no request fills, the last end.
            begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
            made = {
                "counts": sums[ends] - sums[ends - inputs["in_counts"].astype(jnp.int32)],
                "ends": sums[ends] - sums[begins],
                "bounds": sums[bounds[1:]] - sums[bounds[:-1]],
                "most": jnp.full(rows, inputs["in_most"].shape[0]),
                "items": inputs["in_items"][:, 0],
                "flat": inputs["in_flat"],
                "segments": jnp.zeros(rows, x.dtype).at[inputs["in_segments"]].add(x, mode="drop"),
                "twice": 2 * inputs["w"][:, 0],
            }
            each = 10 * x + jnp.append(inputs["w"][:, 0], 0)[inputs["in_segments"]]
            return {name: array[:, None].astype(jnp.int32) for name, array in made.items()} | {"each": each}

        return apply, None
"""
#: Two dims that vary and one that does not; lengths for which nothing is compiled in advance.
FOLDED = """
    import jax

    max_batch_size = 4


    def create(path, config, device):
        def apply(params, inputs):
            vectors, rows = inputs["x"].reshape(-1, 3), inputs["rows"]
            return {"sum": jax.ops.segment_sum(vectors, rows, max_batch_size), "same": -vectors}

        return apply, None


    batch_inputs = {"rows": ("SEGMENT_IDS", "INT32", "x")}
"""
FOLDED_CONFIG = """
    input { name: "x" data_type: TYPE_INT32 dims: [ -1, 3, -1 ] allow_ragged_batch: true }
    output [ { name: "sum" data_type: TYPE_INT32 dims: 3 }, { name: "same" data_type: TYPE_INT32 dims: [ -1, 3, -1 ] } ]
    batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "same" source_input: "x" }
"""
HOST = """
    import numpy as np

    inputs = {"x": "BYTES[n]"}
    outputs = {"first": "BYTES[1]", "loud": "BYTES[n]", "count": "INT32[1]"}
    max_batch_size = 16
    host = True
    ragged = ("x",)
    batch_inputs = {"bounds": ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "INT32", "x")}
    batch_outputs = {"loud": "x"}


    def create(path, config, device):
        def apply(params, inputs):
            x, bounds = inputs["x"], inputs["bounds"]
            loud = np.array([text.upper() for text in x], np.object_)
            count = np.diff(bounds)[:, None].astype(np.int32)
            return {"first": x[bounds[:-1]][:, None], "loud": loud, "count": count}

        return apply, None
"""
PYTHON = """
    import numpy as np
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        def execute(self, requests):
            given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
            lengths = len({array.shape for array in given})
            return [
                pb_utils.InferenceResponse([
                    pb_utils.Tensor("sum", array.sum(axis=1, keepdims=True, dtype=np.int32)),
                    pb_utils.Tensor("lengths", np.array([[lengths]], np.int32)),
                ])
                for array in given
            ]
"""
PYTHON_CONFIG = """
    backend: "python"
    max_batch_size: 8
    input { name: "x" data_type: TYPE_INT32 dims: -1 allow_ragged_batch: true }
    output [ { name: "sum" data_type: TYPE_INT32 dims: 1 }, { name: "lengths" data_type: TYPE_INT32 dims: 1 } ]
    batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_INT32 source_input: "x" }
"""
#: Sequences whose requests have lengths of their own.
STATE = """
    import jax

    inputs = {"x": "INT32[length]"}
    outputs = {"total": "INT32[1]"}
    max_batch_size = 8
    ragged = ("x",)
    buckets = {"length": (16,)}
    batch_inputs = {"rows": ("SEGMENT_IDS", "INT32", "x")}
    state = {"total": "INT32[1]"}


    def create(path, config, device):
        def apply(params, inputs, state):
            total = state["total"] + jax.ops.segment_sum(inputs["x"], inputs["rows"], max_batch_size)[:, None]
            return {"total": total}, {"total": total}

        return apply, None
"""
#: What does not load: what model.py says besides, what config.pbtxt says, and why.
REFUSED: dict[str, tuple[str, str, str]] = {
    "not_ragged": (
        'batch_inputs = {"b": ("BATCH_ELEMENT_COUNT", "INT32", "x")}',
        "",
        "batch input 'b' tells of 'x', which is no input with allow_ragged_batch",
    ),
    "no_such_input": ('ragged = ["z"]', "", "ragged of model.py names 'z', which is no input"),
    "no_such_kind": ('batch_inputs = {"b": ("COUNT", "INT32", "x")}', "", "expected a kind (BATCH_ELEMENT_COUNT, "),
    "segments_of_floats": ('batch_inputs = {"b": ("SEGMENT_IDS", "FP32", "x")}', "", "SEGMENT_IDS are INT32, FP32 is declared"),
    "an_input_as_well": (
        'ragged = ["x"]\nbatch_inputs = {"x": ("SEGMENT_IDS", "INT32", "x")}',
        "",
        "batch input 'x' is an input as well",
    ),
    "no_such_output": (
        'ragged = ["x"]\nbatch_outputs = {"z": "x"}',
        "",
        "unknown target output name 'z' for no_such_output",
    ),
    "other_dims": (
        'ragged = ["x"]\nbatch_outputs = {"y": "x"}',
        "",
        "batch output 'y' has dims [1], and is cut like 'x', which has [-1]",
    ),
    "no_rows": ('ragged = ["x"]\nmax_batch_size = 0', "", "allow_ragged_batch needs a max_batch_size above 0"),
    "not_a_list": ('ragged = "x"', "", "ragged of model.py is 'x', a tuple of names is expected"),
    "two_sources": (
        "",
        'batch_input { kind: BATCH_ITEM_SHAPE target_name: "b" data_type: TYPE_INT32 source_input: ["x", "x"] }',
        "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 2 for two_sources",
    ),
    "other_datatype": (
        "",
        'batch_input { target_name: "b" data_type: TYPE_INT64 source_input: "x" }',
        "batch input data type must be TYPE_INT32 or TYPE_FP32 for other_datatype",
    ),
    "unknown_source": (
        "",
        'batch_input { target_name: "b" data_type: TYPE_INT32 source_input: "z" }',
        "unknown source input name 'z' for unknown_source",
    ),
    "output_twice": (
        "",
        'batch_output { target_name: ["y", "y"] source_input: "x" }',
        "target output name 'y' can only be specified once for output_twice",
    ),
    "too_few": (
        'ragged = ["x"]\noutputs = {"y": "INT32[n]"}\nbatch_outputs = {"y": "x"}\nbuckets = {"n": (8,)}',
        "",
        "output 'y' is computed as INT32[2, 1]; declared are 8 elements of INT32, as many as input 'x' has",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    manual = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition("\n## Ragged batching\n")[2]
    write_model(repository, "ragged_mean", re.findall(r"^```python\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)[0])
    write_model(repository, "kinds", KINDS, DELAY)
    write_model(repository, "several", KINDS, DELAY + "instance_group { count: 2 kind: KIND_CPU }")
    write_model(repository, "folded", FOLDED, FOLDED_CONFIG)
    write_model(repository, "host", HOST, DELAY)
    write_model(repository, "python", PYTHON, PYTHON_CONFIG + DELAY)
    write_model(repository, "state", STATE, "sequence_batching { oldest { max_candidate_sequences: 16 } }")
    for name, (source, config, _) in REFUSED.items():
        model = of_x("x[:2, None]", "INT32[n]", to="INT32[1]", more=f"max_batch_size = 2\n{source}")
        write_model(repository, name, model, config)
    options = {
        "repository": {"control_mode": "explicit", "load": ["*"], "strict_readiness": False, "exit_on_error": False}
    }
    return daemon_of(repository, options)


Ask = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(params=["http", "grpc"])
def asked(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Ask:
    """Sends arrays to a model over one protocol, from whichever thread; returns all outputs."""
    client = request.getfixturevalue("grpc")

    def over_http(model: str, arrays: dict[str, np.ndarray], **parameters: Any) -> dict[str, np.ndarray]:
        inputs = []
        for name, array in arrays.items():
            data = (
                [each.decode() for each in array.reshape(-1)]
                if array.dtype == np.object_
                else array.reshape(-1).tolist()
            )
            inputs.append({"name": name, "shape": array.shape, "datatype": datatype_of(array), "data": data})
        status, answer = daemon.infer(model, inputs, parameters=parameters)
        assert status == 200, answer
        found = {}
        for output in answer["outputs"]:
            array = np.array(output["data"]).reshape(output["shape"])
            found[output["name"]] = np.char.encode(array).astype(np.object_) if array.dtype.kind == "U" else array
        return found

    def over_grpc(model: str, arrays: dict[str, np.ndarray], **parameters: Any) -> dict[str, np.ndarray]:
        inputs = [grpcclient.InferInput(name, array.shape, datatype_of(array)) for name, array in arrays.items()]
        for given, array in zip(inputs, arrays.values(), strict=True):
            given.set_data_from_numpy(array)
        result = client.infer(model, inputs, **parameters)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}

    return over_http if request.param == "http" else over_grpc


def datatype_of(array: np.ndarray) -> str:
    return {"i": "INT32", "f": "FP32", "O": "BYTES"}[array.dtype.kind]


def at_once(ask: Callable[[int], None], count: int = 200) -> None:
    """Calls ``ask`` with each number, up to 24 at a time."""
    with ThreadPoolExecutor(24) as pool:
        for _ in pool.map(ask, range(count)):
            pass


def runs(http: Any, model: str) -> tuple[int, int]:
    """Returns how many requests succeeded, and how many executions there were."""
    (found,) = http.get_inference_statistics(model)["model_stats"]
    return found["inference_stats"]["success"]["count"], found["execution_count"]


@pytest.mark.parametrize("model", ["kinds", "several"])
def test_all_kinds_of_batch_inputs(asked: Ask, http: Any, daemon: DaemonProcess, model: str) -> None:
    chance = random.Random(model)
    lengths = [chance.randint(1, 40) for _ in range(200)]
    before = runs(http, model)

    def ask(number: int) -> None:
        x = np.random.default_rng(number).integers(-1000, 1000, (1, lengths[number]), np.int32)
        found = asked(model, {"x": x, "w": np.array([[number]], np.int32)})
        most = found.pop("most").item()
        assert most >= x.size
        assert most in (8, 32, 64)
        np.testing.assert_array_equal(found.pop("each"), 10 * x + number)
        assert {name: array.tolist() for name, array in found.items()} == {
            "items": [[x.size]],
            "flat": [[x.size]],
            "twice": [[2 * number]],
        } | {name: [[x.sum()]] for name in ("counts", "ends", "bounds", "segments")}

    at_once(ask)
    requests, executions = (now - then for now, then in zip(runs(http, model), before, strict=True))
    assert requests == 200
    assert executions < 150
    # A batch is cut where the largest program is full.
    assert f"compiling model '{model}'" not in daemon.log


def test_the_model_of_the_manual(asked: Ask) -> None:
    """Requests of several rows are answered too, and one that no program has room for."""

    def ask(number: int) -> None:
        chance = np.random.default_rng(number)
        rows, length = int(chance.integers(1, 5)), int(chance.integers(1, 60))
        x = chance.normal(size=(rows, length) if number else (2, 700)).astype(np.float32)
        found = asked("ragged_mean", {"x": x})
        mean = x.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(found["mean"], mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["centred"], x - mean, rtol=1e-4, atol=1e-5)

    at_once(ask, 60)


def test_several_dims_that_vary(asked: Ask) -> None:
    def ask(number: int) -> None:
        chance = np.random.default_rng(number)
        x = chance.integers(-9, 9, (int(chance.integers(1, 3)), int(chance.integers(1, 5)), 3, 1), np.int32)
        found = asked("folded", {"x": x})
        np.testing.assert_array_equal(found["same"], -x)
        np.testing.assert_array_equal(found["sum"], x.sum(axis=(1, 3)))

    at_once(ask, 60)


def test_a_host_model(asked: Ask, http: Any) -> None:
    before = runs(http, "host")

    def ask(number: int) -> None:
        texts = [f"{number}-{i}-a".encode() for i in range(1 + number % 7)]
        found = asked("host", {"x": np.array([texts], np.object_)})
        assert found["first"].tolist() == [texts[:1]]
        assert found["loud"].tolist() == [[text.upper() for text in texts]]
        assert found["count"].tolist() == [[len(texts)]]

    at_once(ask, 100)
    requests, executions = (now - then for now, then in zip(runs(http, "host"), before, strict=True))
    assert requests == 100
    assert executions < 80


def test_a_triton_python_model_gets_different_lengths_at_once(asked: Ask, daemon: DaemonProcess) -> None:
    together = set()

    def ask(number: int) -> None:
        x = np.arange(1 + number % 9, dtype=np.int32)[None]
        found = asked("python", {"x": x})
        assert found["sum"].item() == x.sum()
        together.add(found["lengths"].item())

    at_once(ask, 100)
    assert max(together) > 1
    assert "batch_input is without effect: a Triton Python model sees the tensors of each request" in daemon.log


def test_sequences_of_different_lengths(asked: Ask) -> None:
    def sequence(who: int) -> None:
        chance, total = np.random.default_rng(who), 0
        for step in range(6):
            x = chance.integers(-9, 9, (1, int(chance.integers(1, 9))), np.int32)
            total += x.sum()
            controls = {"sequence_start": step == 0, "sequence_end": step == 5}
            found = asked("state", {"x": x}, sequence_id=who + 1, **controls)
            assert found["total"].item() == total

    at_once(sequence, 24)


def test_what_the_configuration_says(http: Any) -> None:
    config = http.get_model_config("kinds")
    assert [tensor["kind"] for tensor in config["batch_input"]] == [
        "BATCH_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT",
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
        "BATCH_ITEM_SHAPE",
        "BATCH_ITEM_SHAPE_FLATTEN",
    ]
    assert config["batch_output"] == [
        {"target_name": ["each"], "kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "source_input": ["x"]}
    ]
    assert [tensor["name"] for tensor in http.get_model_metadata("kinds")["inputs"]] == ["x", "w"]


def test_what_does_not_load_says_why(http: Any) -> None:
    found = {model["name"]: model.get("reason", "") for model in http.get_model_repository_index()}
    reasons = {name: text in found[name] for name, (_, _, text) in REFUSED.items()}
    assert all(reasons.values()), json.dumps(
        {name: found[name] for name, fits in reasons.items() if not fits}, indent=1
    )
