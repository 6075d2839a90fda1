"""Numbers at the edges of what 64 bits hold, everywhere a client may write one: an answer each time, and nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2

from tests import repositories
from tests.daemon.grpc.frame_client import STREAM, FrameClient, prefixed
from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess, wait_until

EDGES = [value + d for value in (0, 1 << 31, 1 << 32, 1 << 53, 1 << 63, 1 << 64, 10**30) for d in (-1, 0, 1)]
GOOD: dict[str, Any] = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
#: So few that a place which is not given back is missed at once.
IN_FLIGHT = 8


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = repositories.scale_model(tmp_path_factory.mktemp("repository"))
    repositories.write_model(
        repository,
        "slow",
        repositories.of_x("(time.sleep(0.5), x)[1]", more="import time\nmax_batch_size, host = 8, True"),
    )
    options = {"requests": {"max_in_flight": IN_FLIGHT, "worker_wait": PATIENCE}}
    return daemon_of(repository, options)


@pytest.fixture
def neighbour(daemon: DaemonProcess) -> Iterator[Callable[[], None]]:
    """Yields an ordinary client of both protocols; at its end it is still served, and the log has no traceback."""
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:

        def ask() -> None:
            tensor = grpcclient.InferInput("x", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))
            assert client.infer("scale", [tensor]).as_numpy("y").tolist() == [[4, 7, 10, 13]]
            assert daemon.infer("scale", [GOOD])[1]["outputs"][0]["data"] == [4, 7, 10, 13]

        ask()
        yield ask
        # More than there are places: none was kept.
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for answered in [pool.submit(daemon.infer, "slow", [GOOD]) for _ in range(IN_FLIGHT)]:
                assert answered.result()[0] == 200
        ask()
    assert "Traceback" not in daemon.log


def message(model: str = "scale") -> Any:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 4])
    values = np.array([1, 2, 3, 4], np.float32).tobytes()
    return service_pb2.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[values])


@pytest.mark.parametrize("timeout", ["5124095H", "5124096H", "99999999H", "99999999M", "99999999S", "99999999m"])
def test_timeouts(daemon: DaemonProcess, neighbour: Callable[[], None], timeout: str) -> None:
    with FrameClient(int(daemon.grpc_url.split(":")[1])) as client:
        for _ in range(2 * IN_FLIGHT):
            assert client.answer(client.call(message(), grpc_timeout=timeout)).status == 0
            neighbour()
        stream = client.open(STREAM, grpc_timeout=timeout)
        for _ in range(IN_FLIGHT):
            client.data(stream, prefixed(message()))
        client.data(stream, b"", end=True)
        answer = client.answer(stream)
        assert answer.status == 0
        assert [each.error_message for each in answer.streamed()] == [""] * IN_FLIGHT


def test_timeouts_while_the_worker_dies(daemon: DaemonProcess, neighbour: Callable[[], None]) -> None:
    """1. calls with endless timeouts and ordinary ones are under way; 2. the worker is killed; 3. all run on the next one."""
    with FrameClient(int(daemon.grpc_url.split(":")[1])) as client, ThreadPoolExecutor(4) as pool:
        calls = [client.call(message("slow"), grpc_timeout="99999999H") for _ in range(4)]
        asked = [pool.submit(daemon.infer, "slow", [GOOD]) for _ in range(4)]
        (victim,) = daemon.workers
        victim.kill()
        psutil.wait_procs([victim], timeout=PATIENCE)
        assert [client.answer(number).status for number in calls] == [0] * 4
        assert [each.result()[0] for each in asked] == [200] * 4
    wait_until(lambda: len(daemon.workers) == 1, "a worker", daemon)


def test_every_number_of_an_http_request(daemon: DaemonProcess, neighbour: Callable[[], None]) -> None:
    for value in EDGES:
        region = {"shared_memory_region": "r", "shared_memory_byte_size": 64}
        requests: list[dict[str, Any]] = [
            {"inputs": [GOOD], "parameters": {key: value}}
            for key in ("sequence_id", "priority", "timeout", "something")
        ]
        requests += [
            {"inputs": [{**GOOD, "shape": shape}]}
            for shape in ([value], [value, 4], [1, value], [0, value], [value, value])
        ]
        requests += [
            {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": parameters}]}
            for parameters in (
                {"binary_data_size": value},
                {**region, "shared_memory_offset": value},
                {**region, "shared_memory_byte_size": value},
            )
        ]
        requests += [
            {"inputs": [GOOD], "outputs": [{"name": "y", "parameters": parameters}]}
            for parameters in (
                {"classification": value},
                {**region, "shared_memory_offset": value},
                {**region, "shared_memory_byte_size": value},
            )
        ]
        for asked in requests:
            status, answer = daemon.request("POST", "/v2/models/scale/infer", json.dumps(asked).encode())
            assert status in (200, 400, 404), (asked, answer)
        status, answer = daemon.request("POST", f"/v2/models/scale/versions/{value}/infer", b'{"inputs": []}')
        assert status in (400, 404), answer
        for field in ("offset", "byte_size"):
            body = json.dumps({"key": "/none", "offset": 0, "byte_size": 64, field: value}).encode()
            status, answer = daemon.request("POST", "/v2/systemsharedmemory/region/r/register", body)
            assert status in (400, 404) or b"Unable to open" in answer, (field, value, answer)
        for field in ("device_id", "byte_size"):
            fields = {"raw_handle": {"b64": "A" * 86 + "=="}, "device_id": 0, "byte_size": 64, field: value}
            body = json.dumps(fields).encode()
            assert daemon.request("POST", "/v2/cudasharedmemory/region/r/register", body)[0] in (400, 404, 501)
        for path, name in (
            ("trace/setting", "trace_rate"),
            ("trace/setting", "trace_count"),
            ("logging", "log_verbose_level"),
        ):
            given = str(value) if name.startswith("trace") else value
            status, answer = daemon.request("POST", f"/v2/{path}", json.dumps({name: given}).encode())
            assert status in (200, 400), (name, value, answer)
        status, answer = daemon.request("POST", "/v2/logging", b'{"log_verbose_level": 0}')
        body = json.dumps({"x": [1, 2, 3, 4], "priority": value, "timeout": value, "other": value}).encode()
        assert daemon.request("POST", "/v2/models/scale/generate", body)[0] in (200, 400)
        neighbour()


def test_every_number_of_a_grpc_request(daemon: DaemonProcess, neighbour: Callable[[], None]) -> None:
    parameter = service_pb2.InferParameter
    with FrameClient(int(daemon.grpc_url.split(":")[1])) as client:
        for value in EDGES:
            made: list[Any] = []
            kinds = ["int64_param"] * (-(1 << 63) <= value < 1 << 63) + ["uint64_param"] * (0 <= value < 1 << 64)
            for kind in kinds:
                for key in ("sequence_id", "priority", "timeout", "something"):
                    made.append(message())
                    made[-1].parameters[key].CopyFrom(parameter(**{kind: value}))
                for key in ("shared_memory_offset", "shared_memory_byte_size"):
                    for of_output in (False, True):
                        made.append(message())
                        if of_output:
                            tensor = made[-1].outputs.add(name="y")
                        else:
                            del made[-1].raw_input_contents[:]
                            tensor = made[-1].inputs[0]
                        tensor.parameters["shared_memory_region"].string_param = "r"
                        tensor.parameters["shared_memory_byte_size"].int64_param = 64
                        tensor.parameters[key].CopyFrom(parameter(**{kind: value}))
                made.append(message())
                made[-1].outputs.add(name="y").parameters["classification"].CopyFrom(parameter(**{kind: value}))
            if "int64_param" in kinds:
                for shape in ([value], [value, 4], [0, value], [value] * 40):
                    for region in (False, True):
                        made.append(message())
                        made[-1].inputs[0].shape[:] = shape
                        if region:
                            del made[-1].raw_input_contents[:]
                            made[-1].inputs[0].parameters["shared_memory_region"].string_param = "r"
                            made[-1].inputs[0].parameters["shared_memory_byte_size"].int64_param = 64
            for asked in made:
                assert client.answer(client.call(asked)).status in (0, 3, 5), asked
            neighbour()
