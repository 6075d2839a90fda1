"""The stock gRPC clients, synchronous, with callbacks, asyncio and streaming: everything they offer that this server serves."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tensord.protocol import reflection_pb2, reflection_v1alpha_pb2
from tests.daemon_process import PATIENCE, DaemonProcess


def client_of(daemon: DaemonProcess) -> grpcclient.InferenceServerClient:
    return grpcclient.InferenceServerClient(daemon.grpc_url)


def scale_input(value: float = 1.0, module: Any = grpcclient) -> list[Any]:
    given = module.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(np.full((1, 4), value, np.float32))
    return [given]


def test_health_metadata_config(daemon: DaemonProcess) -> None:
    with client_of(daemon) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("scale")
        assert not client.is_model_ready("scale", "2")
        assert not client.is_model_ready("nothing")
        assert client.get_server_metadata().name == "tensord"
        metadata = client.get_model_metadata("scale")
        assert (metadata.name, list(metadata.versions)) == ("scale", ["1"])
        assert [list(tensor.shape) for tensor in metadata.inputs] == [[-1, 4]]
        assert client.get_model_config("scale").config.max_batch_size == 8
        with pytest.raises(
            InferenceServerException, match="Request for unknown model: 'nothing' is not found"
        ) as caught:
            client.get_model_metadata("nothing")
        assert caught.value.status() == "StatusCode.NOT_FOUND"


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_infer(daemon: DaemonProcess, compression: str | None) -> None:
    with client_of(daemon) as client:
        answer = client.infer("scale", scale_input(2), request_id="7", compression_algorithm=compression)
        assert answer.get_response().id == "7"
        assert answer.get_response().model_version == "1"
        assert answer.as_numpy("y").tolist() == [[7.0] * 4]


def test_callbacks(daemon: DaemonProcess) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with client_of(daemon) as client:
        for n in range(20):
            client.async_infer("scale", scale_input(n), lambda result, error: answers.put(error or result))
        got = sorted(float(answers.get(timeout=PATIENCE).as_numpy("y")[0, 0]) for _ in range(20))
    assert got == [3.0 * n + 1 for n in range(20)]


async def test_asyncio(daemon: DaemonProcess) -> None:
    async with aioclient.InferenceServerClient(daemon.grpc_url) as client:
        assert await client.is_server_ready()
        answer = await client.infer("scale", scale_input(3, aioclient))
        assert answer.as_numpy("y").tolist() == [[10.0] * 4]

        async def requests() -> Any:
            for n in range(5):
                yield {"model_name": "scale", "inputs": scale_input(n, aioclient), "request_id": str(n)}

        got = {}
        async for result, error in client.stream_infer(requests()):
            assert error is None
            got[result.get_response().id] = float(result.as_numpy("y")[0, 0])
        assert got == {str(n): 3.0 * n + 1 for n in range(5)}


def test_a_stream_outlives_its_errors(daemon: DaemonProcess) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with client_of(daemon) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("nothing", scale_input(), request_id="bad")
        assert "unknown model: 'nothing'" in answers.get(timeout=PATIENCE)[1].message()
        client.async_stream_infer("scale", scale_input(4), request_id="good")
        result, error = answers.get(timeout=PATIENCE)
        assert error is None
        assert result.as_numpy("y").tolist() == [[13.0] * 4]
        assert result.get_response().parameters["triton_final_response"].bool_param


def test_an_error_ends_a_stream_that_asked_for_it(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(daemon.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.ModelInferRequest(model_name="nothing")
        call = stub.ModelStreamInfer(iter([request]), metadata=[("triton_grpc_error", "true")])
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_many_in_flight_on_one_stream(daemon: DaemonProcess) -> None:
    """More than are allowed in flight at once: the others wait, all are answered."""
    answers: queue.Queue[Any] = queue.Queue()
    with client_of(daemon) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for n in range(1000):
            client.async_stream_infer("scale", scale_input(n), request_id=str(n))
        got = {}
        for _ in range(1000):
            result, error = answers.get(timeout=PATIENCE)
            assert error is None
            got[int(result.get_response().id)] = float(result.as_numpy("y")[0, 0])
    assert got == {n: 3.0 * n + 1 for n in range(1000)}


def sleepy_input(milliseconds: int) -> list[Any]:
    given = grpcclient.InferInput("DELAY_MS", [1], "INT32")
    given.set_data_from_numpy(np.array([milliseconds], np.int32))
    return [given]


def test_answers_come_in_the_order_of_the_requests(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Slow, fast, refused, fast on one stream: clients pair by order. The fast ones are done before the slow one ends."""
    answers: queue.Queue[Any] = queue.Queue()
    until = tmp_path / "until"
    with client_of(daemon) as client, client_of(daemon) as other:

        def done() -> int:
            return int(other.get_inference_statistics("scale").model_stats[0].inference_count)

        before = done()
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("sleepy", sleepy_input(0), request_id="0", parameters={"until": str(until)})
        client.async_stream_infer("scale", scale_input(1), request_id="1")
        client.async_stream_infer("nothing", scale_input(2), request_id="2")
        client.async_stream_infer("scale", scale_input(3), request_id="3")
        while done() < before + 2:
            time.sleep(0.01)
        assert answers.empty()
        until.touch()
        got = [answers.get(timeout=PATIENCE) for _ in range(4)]
    assert [result.get_response().id for result, error in got if error is None] == ["0", "1", "3"]
    assert "unknown model: 'nothing'" in got[2][1].message()


def test_many_streams_are_each_in_order(daemon: DaemonProcess) -> None:
    """Two models of which one is slow now and then, and refused requests, in another mixture on each stream."""

    def ask(client: grpcclient.InferenceServerClient, seed: int, answers: queue.Queue[Any]) -> list[str]:
        chosen = random.Random(seed)
        client.start_stream(lambda result, error: answers.put((result, error)))
        asked = []
        for number in range(60):
            kind = chosen.choice(("sleepy", "scale", "scale", "scale", "nothing"))
            given = sleepy_input(chosen.randrange(5)) if kind == "sleepy" else scale_input(number)
            client.async_stream_infer(kind, given, request_id=str(number))
            asked.append("" if kind == "nothing" else str(number))
        return asked

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client_of(daemon)) for _ in range(8)]
        queues: list[queue.Queue[Any]] = [queue.Queue() for _ in clients]
        asked = [ask(client, seed, answers) for seed, (client, answers) in enumerate(zip(clients, queues, strict=True))]
        for expected, answers in zip(asked, queues, strict=True):
            got = [answers.get(timeout=PATIENCE) for _ in expected]
            assert ["" if error else result.get_response().id for result, error in got] == expected


def test_health_service(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(daemon.grpc_url) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@pytest.mark.parametrize("messages", [reflection_pb2, reflection_v1alpha_pb2], ids=["v1", "v1alpha"])
def test_a_client_that_knows_nothing_walks_everything(daemon: DaemonProcess, messages: Any) -> None:
    """Services, their files, methods and messages are all found, and a call can be made from what was found alone."""
    package = messages.DESCRIPTOR.package
    found = DescriptorPool()

    with grpc.insecure_channel(daemon.grpc_url) as channel:
        reflect = channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            request_serializer=lambda question: question.SerializeToString(),
            response_deserializer=messages.ServerReflectionResponse.FromString,
        )

        def ask(*questions: dict[str, str]) -> list[Any]:
            """Asks them in one call, each after the answer to the one before."""
            asked = [messages.ServerReflectionRequest(**question) for question in questions]
            turns = threading.Semaphore()
            answers = []
            for answer in reflect((each for each in asked if turns.acquire()), timeout=PATIENCE):
                answers.append(answer)
                turns.release()
            assert [answer.original_request for answer in answers] == asked
            assert [answer.error_response.error_message for answer in answers] == [""] * len(asked)
            return answers

        (listed,) = ask({"list_services": "*"})
        services = [service.name for service in listed.list_services_response.service]
        assert services == sorted(services)
        assert services == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            "inference.GRPCInferenceService",
        ]
        files: dict[str, bytes] = {}
        for answer in ask(*({"file_containing_symbol": name} for name in services)):
            for content in reversed(answer.file_descriptor_response.file_descriptor_proto):
                files[FileDescriptorProto.FromString(content).name] = content
        for content in files.values():
            found.AddSerializedFile(content)
        methods = [method for name in services for method in found.FindServiceByName(name).methods]
        assert len(methods) == 24
        symbols = {method.full_name for method in methods}
        symbols |= {each.full_name for method in methods for each in (method.input_type, method.output_type)}
        for name, answer in zip(symbols, ask(*({"file_containing_symbol": name} for name in symbols)), strict=True):
            described = FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0])
            assert name.startswith(described.package)
        for name, answer in zip(files, ask(*({"file_by_filename": name} for name in files)), strict=True):
            assert answer.file_descriptor_response.file_descriptor_proto[0] == files[name]
        ready = found.FindMethodByName("inference.GRPCInferenceService.ModelReady")
        call = channel.unary_unary(f"/{ready.containing_service.full_name}/{ready.name}")
        answer_class, request_class = GetMessageClass(ready.output_type), GetMessageClass(ready.input_type)
        asked = request_class(name="scale").SerializeToString()
        assert answer_class.FromString(call(asked)).ready


def test_an_unknown_method(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(daemon.grpc_url) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
