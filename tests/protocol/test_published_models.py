"""Tests models of our own that do what python_backend's published examples do: each runs unchanged."""

from __future__ import annotations

import io
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from PIL import Image
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonOf, DaemonProcess
from tests.repositories import ensemble, fields, write_model
from tests.scrapes import scrape

#: add_sub, auto_complete and custom_metrics in one: the configuration is the model's, and its time is counted.
ADD_SUB = """
    import json
    import time
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(auto_complete_model_config):
            for name in ("INPUT0", "INPUT1"):
                auto_complete_model_config.add_input({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
            for name in ("OUTPUT0", "OUTPUT1"):
                auto_complete_model_config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [4]})
            auto_complete_model_config.set_max_batch_size(0)
            return auto_complete_model_config

        def initialize(self, args):
            config = json.loads(args["model_config"])
            first = pb_utils.get_output_config_by_name(config, "OUTPUT0")
            second = pb_utils.get_output_config_by_name(config, "OUTPUT1")
            self.types = [pb_utils.triton_string_to_numpy(each["data_type"]) for each in (first, second)]
            self.metric_family = pb_utils.MetricFamily(
                name="requests_process_latency_ns",
                description="Cumulative time spent processing requests",
                kind=pb_utils.MetricFamily.COUNTER,
            )
            self.metric = self.metric_family.Metric(labels={"model": "add_sub", "version": "1"})

        def execute(self, requests):
            responses, began = [], time.time_ns()
            for request in requests:
                a = pb_utils.get_input_tensor_by_name(request, "INPUT0")
                b = pb_utils.get_input_tensor_by_name(request, "INPUT1")
                total, rest = a.as_numpy() + b.as_numpy(), a.as_numpy() - b.as_numpy()
                responses.append(pb_utils.InferenceResponse(output_tensors=[
                    pb_utils.Tensor("OUTPUT0", total.astype(self.types[0])),
                    pb_utils.Tensor("OUTPUT1", rest.astype(self.types[1])),
                ]))
            self.metric.increment(time.time_ns() - began)
            print("Cumulative requests processing latency:", self.metric.value())
            return responses

        def finalize(self):
            print("Cleaning up...")
"""
#: bls, synchronous: which model is asked comes with the request.
BLS = """
    import json
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.model_config = json.loads(args["model_config"])

        def execute(self, requests):
            responses = []
            for request in requests:
                in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
                in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
                model_name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME").as_numpy()[0]
                asked = pb_utils.InferenceRequest(
                    model_name=model_name, requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=[in_0, in_1],
                    trace=request.trace(),
                )
                response = asked.exec()
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                responses.append(pb_utils.InferenceResponse(output_tensors=response.output_tensors()))
            return responses
"""
#: bls, asynchronous: two requests at once, one output of each.
ASYNC_BLS = """
    import asyncio
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        async def execute(self, requests):
            responses = []
            for request in requests:
                inputs = [pb_utils.get_input_tensor_by_name(request, name) for name in ("INPUT0", "INPUT1")]
                waiting = []
                for name in ("add_sub", "add_sub"):
                    asked = pb_utils.InferenceRequest(
                        model_name=name, requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=inputs
                    )
                    waiting.append(asked.async_exec())
                first, second = await asyncio.gather(*waiting)
                for each in (first, second):
                    if each.has_error():
                        raise pb_utils.TritonModelException(each.error().message())
                out = [
                    pb_utils.get_output_tensor_by_name(first, "OUTPUT0"),
                    pb_utils.get_output_tensor_by_name(second, "OUTPUT1"),
                ]
                responses.append(pb_utils.InferenceResponse(output_tensors=out))
            return responses
"""
#: decoupled, square: as many responses as the number says, out of a thread; finalize waits for those.
SQUARE = """
    import json
    import threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            config = json.loads(args["model_config"])
            if not pb_utils.using_decoupled_model_transaction_policy(config):
                raise pb_utils.TritonModelException("the model can only be decoupled")
            self.inflight, self.lock = 0, threading.Lock()

        def execute(self, requests):
            for request in requests:
                number = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                thread = threading.Thread(target=self.respond, args=(request.get_response_sender(), number))
                thread.daemon = True
                with self.lock:
                    self.inflight += 1
                thread.start()
            return None

        def respond(self, sender, number):
            for _ in range(number[0]):
                sender.send(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUT", number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            with self.lock:
                self.inflight -= 1

        def finalize(self):
            while self.inflight:
                pass
"""
#: bls_decoupled: the sum of what two requests to the square bring, which numpy makes wider on the way.
SUM = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                asked = pb_utils.InferenceRequest(
                    model_name="square", inputs=[pb_utils.get_input_tensor_by_name(request, "IN")],
                    requested_output_names=["OUT"],
                )
                total = np.array([0])
                for response in asked.exec(decoupled=True):
                    if response.has_error():
                        raise pb_utils.TritonModelException(response.error().message())
                    if len(response.output_tensors()) > 0:
                        total += pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
                responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SUM", total)]))
            return responses
"""
ASYNC_SUM = """
    import asyncio
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        async def execute(self, requests):
            number = pb_utils.get_input_tensor_by_name(requests[0], "IN")
            waiting = []
            for _ in range(2):
                asked = pb_utils.InferenceRequest(model_name="square", inputs=[number], requested_output_names=["OUT"])
                waiting.append(asked.async_exec(decoupled=True))
            total = np.array([0])
            for responses in await asyncio.gather(*waiting):
                for response in responses:
                    if len(response.output_tensors()) > 0:
                        total += pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
            return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SUM", total)])]
"""
#: decoupled, repeat: out of a thread, each response after its delay; execute returns before.
REPEAT = """
    import threading
    import time
    import numpy
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            (request,) = requests
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY", "WAIT")
            )
            threading.Thread(target=self.respond, args=(request.get_response_sender(), values, delays)).start()
            time.sleep(wait[0] / 1000)

        def respond(self, sender, values, delays):
            for number, (value, delay) in enumerate(zip(values, delays)):
                time.sleep(delay / 1000)
                out = [
                    pb_utils.Tensor("OUT", numpy.array([value], numpy.int32)),
                    pb_utils.Tensor("IDX", numpy.array([number], numpy.uint32)),
                ]
                sender.send(pb_utils.InferenceResponse(output_tensors=out))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
#: rescheduling: the first round leaves a thread that answers, the second one does nothing but let go of a sender.
RESCHEDULED = """
    import threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.rounds = 0

        def execute(self, requests):
            for request in requests:
                number = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0]
                sender = request.get_response_sender()
                self.rounds += 1
                if self.rounds % 2:
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                    self.sender, self.number = sender, number
                else:
                    # The second round is there: what answers is the first one's.
                    threading.Timer(0.05, self.respond, (self.sender, self.number)).start()
                    del self.sender

        def respond(self, sender, number):
            for left in range(number, -1, -1):
                out = [pb_utils.Tensor("OUT", np.array([left], np.int32))]
                sender.send(pb_utils.InferenceResponse(output_tensors=out))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
#: preprocessing: files of images into arrays, as the first step of an ensemble.
PREPROCESS = """
    import io
    import numpy as np
    import triton_python_backend_utils as pb_utils
    from PIL import Image

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                files = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
                pixels = [self.pixels(content) for content in files.ravel()]
                out = pb_utils.Tensor("OUTPUT", np.stack(pixels).astype(np.float32))
                responses.append(pb_utils.InferenceResponse([out]))
            return responses

        def pixels(self, content):
            image = Image.open(io.BytesIO(content)).convert("RGB").resize((8, 8))
            return np.asarray(image, np.float32).transpose(2, 0, 1) / 255
"""
#: The second step: how much of each colour there is.
COLOURS = """
    inputs, outputs = {"input": "FP32[3, 8, 8]"}, {"output": "FP32[3]"}
    max_batch_size = 8

    def create(path, config, device):
        return (lambda params, inputs: {"output": inputs["input"].mean((2, 3))}), {}
"""
PAIRS = "INPUT0 FP32 4, INPUT1 FP32 4", "OUTPUT0 FP32 4, OUTPUT1 FP32 4"


def write_image_ensemble(repository: Path) -> None:
    """Writes the ensemble with the names that tritonclient's example for images expects."""
    write_model(
        repository, "preprocess", PREPROCESS, fields("INPUT STRING 1", "OUTPUT FP32 3 8 8", "max_batch_size: 8")
    )
    labels = 'output { name: "output" data_type: TYPE_FP32 dims: 3 label_filename: "labels.txt" }'
    write_model(repository, "inception", COLOURS, labels)
    (repository / "inception" / "labels.txt").write_text("red\ngreen\nblue\n")
    steps = [
        ("preprocess", {"INPUT": "INPUT"}, {"OUTPUT": "pixels"}),
        ("inception", {"input": "pixels"}, {"output": "OUTPUT"}),
    ]
    ensemble(repository, "preprocess_inception_ensemble", ["INPUT STRING 1"], ["OUTPUT FP32 3"], steps, 8)


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "add_sub", ADD_SUB)
    write_model(repository, "bls_sync", BLS, fields(f"{PAIRS[0]}, MODEL_NAME STRING 1", PAIRS[1]))
    write_model(repository, "bls_async", ASYNC_BLS, fields(*PAIRS))
    write_model(
        repository,
        "square",
        SQUARE,
        fields("IN INT32 1", "OUT INT32 1", "model_transaction_policy { decoupled: true }"),
    )
    write_model(repository, "sum", SUM, fields("IN INT32 1", "SUM INT32 1"))
    write_model(repository, "sum_async", ASYNC_SUM, fields("IN INT32 1", "SUM INT32 1"))
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(
        repository,
        "repeat",
        REPEAT,
        fields("IN INT32 -1, DELAY UINT32 -1, WAIT UINT32 1", "OUT INT32 1, IDX UINT32 1", decoupled),
    )
    rounds = decoupled + "sequence_batching { iterative_sequence: true }"
    write_model(repository, "rescheduled", RESCHEDULED, fields("IN INT32 1", "OUT INT32 1", rounds))
    write_image_ensemble(repository)
    return daemon_of(repository)


A, B = np.arange(4, dtype=np.float32), np.full(4, 0.5, np.float32)


def given(name: str, array: Any, datatype: str = "FP32") -> httpclient.InferInput:
    made = httpclient.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


@pytest.mark.parametrize("model", ["add_sub", "bls_sync", "bls_async"])
def test_sums_and_differences(http: httpclient.InferenceServerClient, daemon: DaemonProcess, model: str) -> None:
    inputs = [given("INPUT0", A), given("INPUT1", B)]
    if model == "bls_sync":
        inputs.append(given("MODEL_NAME", np.array([b"add_sub"], np.object_), "BYTES"))
    answer = http.infer(model, inputs)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), A - B)
    assert scrape(daemon.metrics_url).value("requests_process_latency_ns_total", model="add_sub", version="1") > 0


def test_a_model_that_is_not_there_is_said(http: httpclient.InferenceServerClient) -> None:
    inputs = [
        given("INPUT0", A),
        given("INPUT1", B),
        given("MODEL_NAME", np.array([b"undefined_model"], np.object_), "BYTES"),
    ]
    with pytest.raises(InferenceServerException) as caught:
        http.infer("bls_sync", inputs)
    assert caught.value.message() == (
        "Failed to process the request(s) for model 'bls_sync_0', message: TritonModelException: Model undefined_model - Error "
        "when running inference: Failed for execute the inference request. Model 'undefined_model' is not ready."
    )


@pytest.mark.parametrize("number", [4, 2, 0, 1])
def test_squares(http: httpclient.InferenceServerClient, number: int) -> None:
    asked = [given("IN", np.array([number], np.int32), "INT32")]
    for model, total in (("sum", number**2), ("sum_async", 2 * number**2)):
        answer = http.infer(model, asked).as_numpy("SUM")
        assert answer.dtype == np.int64, "as the model makes it, whatever it declares"
        assert answer.tolist() == [total]


def test_a_decoupled_model_over_a_stream(daemon: DaemonProcess) -> None:
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        client.start_stream(lambda result, error: came.put(error or int(result.as_numpy("OUT")[0])))
        asked = grpcclient.InferInput("IN", [1], "INT32")
        asked.set_data_from_numpy(np.array([3], np.int32))
        client.async_stream_infer("square", [asked])
        client.stop_stream()
    assert [came.get() for _ in range(3)] == [3, 3, 3]


def streamed(daemon: DaemonProcess, model: str, inputs: list[Any], count: int, output: str = "OUT") -> list[int]:
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        client.start_stream(lambda result, error: came.put(error or int(result.as_numpy(output)[0])))
        client.async_stream_infer(model, inputs)
        client.stop_stream()
    return [came.get() for _ in range(count)]


def asked(name: str, values: list[int], datatype: str = "INT32") -> grpcclient.InferInput:
    made = grpcclient.InferInput(name, [len(values)], datatype)
    made.set_data_from_numpy(np.array(values, np.int32 if datatype == "INT32" else np.uint32))
    return made


def test_responses_after_execute_has_returned(daemon: DaemonProcess) -> None:
    inputs = [asked("IN", [4, 2, 0, 1]), asked("DELAY", [1, 2, 30, 4], "UINT32"), asked("WAIT", [5], "UINT32")]
    assert streamed(daemon, "repeat", inputs, 4) == [4, 2, 0, 1]
    assert streamed(daemon, "repeat", inputs, 4, "IDX") == [0, 1, 2, 3]


def test_a_sender_of_an_earlier_round_goes_on(daemon: DaemonProcess) -> None:
    assert streamed(daemon, "rescheduled", [asked("IN", [2])], 3) == [2, 1, 0]


@pytest.mark.parametrize("module", [httpclient, grpcclient])
def test_classes_of_images_by_an_ensemble(daemon: DaemonProcess, module: Any) -> None:
    files = []
    for colour in ((10, 20, 200), (200, 100, 0)):
        file = io.BytesIO()
        Image.new("RGB", (20, 10), colour).save(file, "PNG")
        files.append([file.getvalue()])
    with module.InferenceServerClient(daemon.url if module is httpclient else daemon.grpc_url) as client:
        asked = module.InferInput("INPUT", [2, 1], "BYTES")
        asked.set_data_from_numpy(np.array(files, np.object_))
        wanted = module.InferRequestedOutput("OUTPUT", class_count=2)
        found = client.infer("preprocess_inception_ensemble", [asked], outputs=[wanted]).as_numpy("OUTPUT")
    assert [[text.decode().split(":")[2] for text in row] for row in found] == [["blue", "green"], ["red", "green"]]
