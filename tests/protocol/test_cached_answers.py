"""The response cache of a real daemon: what is answered again, on every way there is, and what an operator sees of it."""

from __future__ import annotations

import json
import shutil
import textwrap
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensord_client
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonOf, DaemonProcess
from tests.repositories import answering, ensemble, fields, of_x, write_model
from tests.scrapes import scrape

#: Counts its executions: whoever is answered again gets the number of the first time. Negative input fails.
COUNTS = answering(
    """
    x = given(request)
    TritonPythonModel.calls += 1
    if x.size and x.ravel()[0] < 0:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("no"))
    made = {"y": x, "calls": np.array([self.calls], np.int32)}
    wanted = request.requested_output_names()
    return response({"calls": self.calls}, **{name: made[name] for name in made if name in wanted})
    """,
    more="calls = 0",
)
CONFIG = fields("x INT32 -1", "y INT32 -1, calls INT32 1", "response_cache { enable: true }")
#: Jitted, and it says itself that its answers may be given again.
SCALE = of_x("2 * x", "FP32[n]", more='response_cache = True\nmax_batch_size = 8\nbuckets = {"n": [1024, 65536]}')
#: Multiplies by a parameter, and adds what its version says.
FACTOR = of_x(
    'params["factor"] * x + ADDED',
    "FP32[1]",
    more="import jax.numpy as jnp\nmax_batch_size = 8",
    params='{"factor": jnp.ones(1)}',
)
#: Asks that model, and would have its answers kept.
ASKS = """
    import tensord.models

    inputs = {"x": "FP32[1]"}
    outputs = {"y": "FP32[1]"}
    max_batch_size = 8
    host = True
    response_cache = True

    def create(path, config, device):
        return (lambda params, inputs: tensord.models.call("factor", {"x": inputs["x"]})), None
"""
REFUSED = fields("x INT32 -1", "y INT32 -1", "response_cache { enable: true }")


#: Models with a response cache whose answers depend on others: by steps, steps of steps, calls, and calls of a step.
DEPENDENT = ("whole", "outer", "asks", "around")


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    folder = tmp_path_factory.mktemp("cache")
    models = folder / "models"
    for name in ("counts", "counted", "told", "left"):
        write_model(models, name, COUNTS, CONFIG)
    write_model(models, "scale", SCALE)
    write_model(models, "factor", FACTOR.replace("ADDED", "0"))
    write_model(models, "asks", ASKS)
    cached = "response_cache { enable: true }"
    for name, member in (("whole", "factor"), ("outer", "whole"), ("around", "asks")):
        ensemble(models, name, ["x FP32 1"], ["y FP32 1"], [(member, {"x": "x"}, {"y": "y"})], 8, cached)
    write_model(models, "uncached", COUNTS, CONFIG.replace("true", "false"))
    write_model(models, "sequences", COUNTS, REFUSED + "sequence_batching { }")
    write_model(models, "decoupled", COUNTS, REFUSED + "model_transaction_policy { decoupled: true }")
    loaded = [f"--load-model={name}" for name in ("counts", "counted", "told", "left", "scale", "uncached", *DEPENDENT)]
    arguments = ["--model-control-mode=explicit", "--cache-config", "local,size=4194304", *loaded]
    return daemon_of(models, None, arguments, folder=folder)


def ask(daemon: DaemonProcess, model: str, data: list[int], **fields: Any) -> dict[str, Any]:
    """Sends a request; returns the outputs' data by name."""
    x = {"name": "x", "datatype": "INT32", "shape": [len(data)], "data": data}
    status, answer = daemon.infer(model, [x], **fields)
    assert status == 200, answer
    return {output["name"]: output["data"] for output in answer["outputs"]}


def statistics(daemon: DaemonProcess, model: str) -> dict[str, Any]:
    (entry,) = json.loads(daemon.get(f"/v2/models/{model}/stats")[1])["model_stats"]
    return dict(entry)


def counts(daemon: DaemonProcess, model: str) -> dict[str, int]:
    return {name: each["count"] for name, each in statistics(daemon, model)["inference_stats"].items()}


def test_what_was_answered_is_answered_again_on_every_way(daemon: DaemonProcess) -> None:
    first = ask(daemon, "counts", [1, 2], id="one", parameters={"q": 1})
    assert ask(daemon, "counts", [1, 2], id="two") == first
    x = grpcclient.InferInput("x", [2], "INT32")
    x.set_data_from_numpy(np.array([1, 2], np.int32))
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        answer = client.infer("counts", [x])
        assert answer.as_numpy("calls").tolist() == first["calls"]
        assert answer.get_response().parameters["calls"].int64_param == first["calls"][0]
    # Other values, another shape, other outputs of a model that is told which.
    others = [ask(daemon, "counts", data)["calls"] for data in ([1, 3], [1, 2, 0])]
    others.append(ask(daemon, "counts", [1, 2], outputs=[{"name": "calls"}])["calls"])
    assert len({tuple(each) for each in (first["calls"], *others)}) == 4
    assert ask(daemon, "uncached", [1])["calls"] != ask(daemon, "uncached", [1])["calls"]


def test_a_hit_counts_as_in_triton_and_metrics_show_it(daemon: DaemonProcess) -> None:
    for data in ([1], [1], [2], [1]):
        ask(daemon, "counted", data)
    computed = dict.fromkeys(("compute_input", "compute_infer", "compute_output", "cache_miss"), 2)
    assert counts(daemon, "counted") == {"success": 4, "fail": 0, "queue": 4, "cache_hit": 2, **computed}
    found = statistics(daemon, "counted")
    assert (found["inference_count"], found["execution_count"]) == (2, 2)
    assert found["inference_stats"]["cache_hit"]["ns"] > 0
    samples = scrape(daemon.metrics_url)
    assert samples.model("nv_inference_request_success", "counted") == 4
    assert samples.model("nv_cache_num_hits_per_model", "counted") == 2
    assert samples.model("nv_cache_num_misses_per_model", "counted") == 2
    assert samples.model("nv_cache_hit_duration_per_model", "counted") >= 0
    assert "uncached" not in samples.of("nv_cache_num_hits_per_model", "model")
    assert "uncached" not in samples.of("nv_cache_miss_duration_per_model", "model")


def test_errors_are_not_kept(daemon: DaemonProcess) -> None:
    x = {"name": "x", "datatype": "INT32", "shape": [1], "data": [-1]}
    before = counts(daemon, "told")
    assert [daemon.infer("told", [x])[0] for _ in range(2)] == [500, 500]
    after = counts(daemon, "told")
    assert (after["fail"] - before["fail"], after["cache_hit"], after["cache_miss"]) == (2, 0, 0)


def test_a_new_load_answers_anew(daemon: DaemonProcess) -> None:
    """Its counter begins at one again, so a kept answer would be seen."""
    assert [ask(daemon, "left", [number])["calls"] for number in (1, 2, 3)] == [[1], [2], [3]]
    path = Path(daemon.sections["repository"]["paths"][0], "left", "1", "model.py")
    path.write_text(path.read_text().replace("calls = 0", "calls = 100"))
    assert daemon.request("POST", "/v2/repository/models/left/load", b"{}")[0] == 200
    assert ask(daemon, "left", [2])["calls"] == [101]


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_an_answer_depends_on_is_seen_at_once(daemon: DaemonProcess, name: str) -> None:
    """Pushes into a model that another one uses, a roll-back, and another version of it; answers say which numbers they are of.

    Each is asked twice: where answers are kept, the second one is.
    """
    says = name not in ("asks", "around")
    with tensord_client.connect(daemon.url) as client:
        factor = client.model("factor", timeout=60)

        def both() -> set[tuple[float, Any]]:
            found = set()
            for _ in range(2):
                fields = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
                status, answer = daemon.infer(name, **fields, parameters={"tensord_parameters": True})
                assert status == 200, answer
                told = answer.get("parameters", {}).get("parameter_version.factor")
                found.add((answer["outputs"][0]["data"][0], told))
                # Whoever does not ask gets the same answer, and is not told.
                status, answer = daemon.infer(name, **fields)
                assert (status, answer["outputs"][0]["data"][0] in [value for value, _ in found]) == (200, True)
                assert "parameter_version.factor" not in answer.get("parameters", {})
            return found

        def hits() -> int:
            return counts(daemon, name)["cache_hit"]

        before = hits()
        for value in (1, 2, 3):
            number = factor.parameters.update({"factor": np.array([value], np.float32)})
            assert both() == {(value, number if says else None)}
        assert factor.parameters.roll_back() == number - 1
        assert both() == {(2, number - 1 if says else None)}
        # Of a model that calls others nothing is kept.
        assert hits() - before == (12 if says else 0)
        second = Path(daemon.sections["repository"]["paths"][0], "factor", "2", "model.py")
        second.parent.mkdir()
        try:
            second.write_text(textwrap.dedent(FACTOR).replace("ADDED", "100"))
            assert daemon.request("POST", "/v2/repository/models/factor/load", b"{}")[0] == 200
            assert both() == {(101, 0 if says else None)}
        finally:
            shutil.rmtree(second.parent)
            assert daemon.request("POST", "/v2/repository/models/factor/load", b"{}")[0] == 200
        assert {value for value, _ in both()} == {1}


@pytest.mark.parametrize("elements", [4, 40_000])
def test_regions_are_read_once_and_written_each_time(daemon: DaemonProcess, elements: int) -> None:
    """Small and large tensors of a jitted model; a client that writes to its regions changes no kept answer."""
    key, size = f"/tensord-test-{uuid.uuid4().hex}", 4 * elements
    given = np.arange(elements, dtype=np.float32)
    x = httpclient.InferInput("x", [1, elements], "FP32")
    y = httpclient.InferRequestedOutput("y")
    handle = shm.create_shared_memory_region(key[1:], key, 2 * size)
    with httpclient.InferenceServerClient(daemon.url) as client:
        client.register_system_shared_memory(key[1:], key, 2 * size)
        x.set_shared_memory(key[1:], size)
        y.set_shared_memory(key[1:], size, offset=size)
        before = counts(daemon, "scale")
        for _ in range(3):
            shm.set_shared_memory_region(handle, [given])
            shm.set_shared_memory_region(handle, [np.full(elements, -1, np.float32)], offset=size)
            client.infer("scale", [x], outputs=[y])
            made = shm.get_contents_as_numpy(handle, np.float32, [elements], offset=size)
            assert np.array_equal(made, 2 * given)
        # Whatever the client does to its memory afterwards: another client asks the same and gets the right answer.
        shm.set_shared_memory_region(handle, [np.full(2 * elements, 7, np.float32)])
        x.set_data_from_numpy(given[None])
        assert np.array_equal(client.infer("scale", [x]).as_numpy("y"), 2 * given[None])
        after = counts(daemon, "scale")
        assert {name: after[name] - before[name] for name in ("cache_hit", "cache_miss")} == {
            "cache_hit": 3,
            "cache_miss": 1,
        }
        client.unregister_system_shared_memory(key[1:])
    shm.destroy_shared_memory_region(handle)


def test_repeated_requests_of_a_form_go_to_the_cache_as_well(daemon: DaemonProcess) -> None:
    """A hundred times the same: none of them is taken by a way that knows no cache."""
    before = counts(daemon, "scale")
    x = httpclient.InferInput("x", [1, 16], "FP32")
    x.set_data_from_numpy(np.full((1, 16), 3, np.float32))
    with httpclient.InferenceServerClient(daemon.url) as client:
        for _ in range(100):
            assert client.infer("scale", [x]).as_numpy("y")[0, 0] == 6
    after = counts(daemon, "scale")
    assert (after["cache_miss"] - before["cache_miss"], after["cache_hit"] - before["cache_hit"]) == (1, 99)


def test_an_answer_that_is_too_large_is_given_and_not_kept(daemon: DaemonProcess) -> None:
    elements = 1_200_000
    x = httpclient.InferInput("x", [1, elements], "FP32")
    x.set_data_from_numpy(np.ones((1, elements), np.float32))
    with httpclient.InferenceServerClient(daemon.url) as client:
        for _ in range(2):
            assert client.infer("scale", [x], request_id="big").as_numpy("y").sum() == 2 * elements
    daemon.wait_log(r"\[request id: big\] an answer of model 'scale' is too large for the response cache", 2)


@pytest.mark.parametrize(
    ("model", "asked"), [("sequences", "sequence batching scheduler"), ("decoupled", "'decoupled' transaction policy")]
)
def test_what_cannot_be_answered_again_is_not_loaded(daemon: DaemonProcess, model: str, asked: str) -> None:
    with (
        httpclient.InferenceServerClient(daemon.url) as client,
        pytest.raises(InferenceServerException, match="failed to poll from model repository"),
    ):
        client.load_model(model)
    daemon.wait_log(
        f"Response Cache does not currently support model {model} with {asked}. Please disable the response cache"
    )
