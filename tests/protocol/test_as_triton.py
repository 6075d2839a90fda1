"""Tests what Triton does where others would do something else: final answers, iterators, turns, ids, encodings, arguments."""

from __future__ import annotations

import json
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonOf, DaemonProcess, wait_until
from tests.repositories import answering, ensemble, fields, of_x, write_model
from tests.scrapes import scrape

#: Numbers up to n; the last one is the end, or with an odd n the end follows it. It notes whether it was asked to stop.
COUNTS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender, n = request.get_response_sender(), int(request.inputs()[0].as_numpy()[0])
                for i in range(n):
                    told = {"stopped": request.is_cancelled() and sender.is_cancelled()}
                    response = pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([i], np.int32))], parameters=told)
                    sender.send(response, FINAL if i + 1 == n and n % 2 == 0 else 0)
                if n % 2 or not n:
                    sender.send(flags=FINAL)
"""
COUNTS_CONFIG = fields("n INT32 1", "y INT32 1", "model_transaction_policy { decoupled: true }")
#: Cancels a call after its first response, and tells what still came.
CANCELS = answering("""
    asked = pb_utils.InferenceRequest(model_name="counts", inputs=request.inputs(), requested_output_names=["y"])
    responses, came = asked.exec(decoupled=True), 0
    for each in responses:
        assert not each.has_error(), each.error().message()
        responses.cancel()
        came += len(each.output_tensors())
    return response(y=np.array([came], np.int32))
""")
#: Its coding is what its first line says; the text is one byte a character.
LATIN = "# -*- coding: latin-1 -*-\ninputs = {}\noutputs = {'y': 'BYTES[1]'}\nhost = True\nimport numpy\n" + (
    "def create(path, config, device):\n    return (lambda params, inputs: {'y': numpy.array(['\xe9'], object)}), {}\n"
)
#: Writes down its name each time.
TURNS = """
    import pathlib
    import time
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.name = args["model_name"]

        def execute(self, requests):
            folder = pathlib.Path({folder!r})
            with open(folder / "turns", "a") as file:
                file.write(self.name + "\\n")
            while not (folder / "go").exists():
                time.sleep(0.01)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]) for each in requests]
"""
TURNS_CONFIG = """
    backend: "python"
    input {{ name: "x" data_type: TYPE_INT32 dims: [ 1 ] }}
    output {{ name: "y" data_type: TYPE_INT32 dims: [ 1 ] }}
    instance_group {{ count: 1 rate_limiter {{ resources {{ name: "R" count: 1 }} priority: {priority} }} }}
"""
#: Tells what it knows of the sequence of its request.
TOLD = """
    inputs, outputs, host = {}, {"y": "BYTES[1]"}, True
    request = {"sequence_id": "BYTES"}

    def create(path, config, device):
        return (lambda params, inputs, request: {"y": request["sequence_id"]}), {}
"""
MARK = "\ufeff"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turns")


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory, folder: Path) -> DaemonProcess:
    models = tmp_path_factory.mktemp("models")
    write_model(models, "counts", COUNTS, COUNTS_CONFIG)
    write_model(models, "cancels", CANCELS, COUNTS_CONFIG.replace("decoupled: true", "decoupled: false"))
    more = "model_transaction_policy { decoupled: true }"
    ensemble(models, "last", ["n INT32 1"], ["y INT32 1"], [("counts", {"n": "n"}, {"y": "y"})], more=more)
    for priority, name in ((1, "often"), (2, "seldom")):
        write_model(models, name, TURNS.format(folder=str(folder)), TURNS_CONFIG.format(priority=priority))
    write_model(models, "told", TOLD)
    write_model(models, "latin", "").joinpath("model.py").write_bytes(LATIN.encode("latin-1"))
    write_model(
        models,
        "labelled",
        of_x("x", "FP32[2]", more="host = True"),
        'output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }',
    )
    config = models / "labelled" / "config.pbtxt"
    config.write_text(MARK + config.read_text(), "utf-8")
    (models / "labelled" / "labels.txt").write_text(MARK + "cat\ndog\n", "utf-8")
    options = {"workers": {"device": "cpu", "pin": False, "cpu": 1}, "rate_limit": {"mode": "execution_count"}}
    return daemon_of(models, options)


def infer(daemon: DaemonProcess, model: str, body: dict[str, Any]) -> Any:
    status, content = daemon.request("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())
    assert status == 200, content
    return json.loads(content)["outputs"][0]["data"]


def number(value: int) -> grpcclient.InferInput:
    given = grpcclient.InferInput("n", [1], "INT32")
    given.set_data_from_numpy(np.array([value], np.int32))
    return given


@pytest.mark.parametrize("model", ["counts", "last"])
@pytest.mark.parametrize("n", [0, 1, 2, 4, 5])
def test_the_answer_with_which_no_step_is_left_is_final(daemon: DaemonProcess, model: str, n: int) -> None:
    """A caller without empty final answers sees the end at the called model's last answer."""
    came: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        client.start_stream(lambda result, error: came.put(error or result.get_response()))
        client.async_stream_infer(model, [number(n)])
        client.async_stream_infer("counts", [number(2)], request_id="behind")
        client.stop_stream()
    answers = [came.get() for _ in range(came.qsize())]
    finals = [answer.parameters["triton_final_response"].bool_param for answer in answers if answer.id != "behind"]
    assert finals == [i + 1 == n and n % 2 == 0 for i in range(n)]


def test_an_iterator_that_is_cancelled_brings_what_comes(daemon: DaemonProcess) -> None:
    assert infer(daemon, "cancels", {"inputs": [{"name": "n", "datatype": "INT32", "shape": [1], "data": [6]}]}) == [6]


def test_priorities_of_the_rate_limiter(daemon: DaemonProcess, folder: Path) -> None:
    """While both models always have work, the one of lower priority gets half as many runs."""
    given = grpcclient.InferInput("x", [1], "INT32")
    given.set_data_from_numpy(np.zeros(1, np.int32))
    done: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        for _ in range(40):
            for model in ("often", "seldom"):
                client.async_infer(model, [given], callback=lambda result, error: done.put(error))
        wait_until(lambda: all(_queued(daemon, model) for model in ("often", "seldom")), "all wait")
        (folder / "go").touch()
        assert [done.get() for _ in range(80)] == [None] * 80
    turns = (folder / "turns").read_text().split()[:45]
    assert turns.count("often") >= 1.8 * turns.count("seldom")


def _queued(daemon: DaemonProcess, model: str) -> bool:
    return scrape(daemon.metrics_url).model("nv_inference_pending_request_count", model) >= 39


@pytest.mark.parametrize("value", [0, 7, (1 << 63) + 5, (1 << 64) - 1])
def test_numbers_of_sequences(daemon: DaemonProcess, value: int) -> None:
    text = str(value) if value else ""
    parameters = {"sequence_id": value} if value else {}
    assert infer(daemon, "told", {"inputs": [], "parameters": parameters}) == [text]
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        request = service_pb2.ModelInferRequest(model_name="told")
        if value:
            request.parameters["sequence_id"].uint64_param = request.parameters["priority"].uint64_param = value
        answer = client._client_stub.ModelInfer(request)
    assert answer.raw_output_contents[0][4:].decode() == text


def test_files_with_a_byte_order_mark_and_other_encodings(daemon: DaemonProcess) -> None:
    asked = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [2, 1]}],
        "outputs": [{"name": "y", "parameters": {"classification": 1}}],
    }
    assert infer(daemon, "labelled", asked) == ["2.000000:0:cat"]
    assert infer(daemon, "latin", {"inputs": []}) == ["\xe9"]


def test_what_was_meant_is_named(daemon: DaemonProcess) -> None:
    """A misspelt input is a parameter to generate; a model with several responses has other ways than infer."""
    status, content = daemon.request("POST", "/v2/models/labelled/generate", b'{"xx": 1}')
    assert (status, json.loads(content)["error"].partition("missing required ")[2]) == (
        400,
        "input(s) ['x']. Please provide all required input(s). Its parameters are ['xx'].",
    )
    status, content = daemon.request("POST", "/v2/models/counts/infer", b'{"inputs": []}')
    assert (status, "ask generate_stream" in json.loads(content)["error"]) == (501, True)
    with (
        grpcclient.InferenceServerClient(daemon.grpc_url) as client,
        pytest.raises(InferenceServerException, match="ask ModelStreamInfer"),
    ):
        client.infer("counts", [number(2)])
