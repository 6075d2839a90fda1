"""What python_backend's published examples do, in models of our own: each is written as these are, and runs as it stands."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonProcess
from tests.protocol.calling_models import fields
from tests.repositories import write_model
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
                    model_name=model_name.decode(), requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=[in_0, in_1],
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
#: jax: DLPack in and out of a compiled function.
JAX = """
    import jax
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.add_sub = jax.jit(lambda a, b: (a + b, a - b))

        def execute(self, requests):
            responses = []
            for request in requests:
                a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
                total, rest = self.add_sub(jax.numpy.array(a), jax.numpy.array(b))
                out = [pb_utils.Tensor.from_dlpack("OUTPUT0", total), pb_utils.Tensor.from_dlpack("OUTPUT1", rest)]
                responses.append(pb_utils.InferenceResponse(output_tensors=out))
            return responses
"""
PAIRS = "INPUT0 FP32 4, INPUT1 FP32 4", "OUTPUT0 FP32 4, OUTPUT1 FP32 4"


@pytest.fixture(scope="module")
def daemon(leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
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
    write_model(repository, "jax", JAX, fields(*PAIRS))
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [repository]) as running:
        running.wait_ready()
        yield running


A, B = np.arange(4, dtype=np.float32), np.full(4, 0.5, np.float32)


def given(name: str, array: Any, datatype: str = "FP32") -> httpclient.InferInput:
    made = httpclient.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


@pytest.mark.parametrize("model", ["add_sub", "bls_sync", "bls_async", "jax"])
def test_sums_and_differences(http: httpclient.InferenceServerClient, daemon: DaemonProcess, model: str) -> None:
    inputs = [given("INPUT0", A), given("INPUT1", B)]
    if model == "bls_sync":
        inputs.append(given("MODEL_NAME", np.array([b"add_sub"], np.object_), "BYTES"))
    answer = http.infer(model, inputs)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT1"), A - B)
    if model != "jax":
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
        assert answer.dtype == np.int32, "as it is declared"
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
