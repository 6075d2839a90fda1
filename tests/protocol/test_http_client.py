"""The stock synchronous and asyncio HTTP clients: everything they offer that this server serves."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import tritonclient.http.aio as aioclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonProcess
from tests.protocol.tensors import JSON_DATATYPES, TENSORS, same


def client_of(daemon: DaemonProcess, **options: Any) -> httpclient.InferenceServerClient:
    return httpclient.InferenceServerClient(daemon.url, **options)


def tensor(name: str, datatype: str, values: Any, binary: bool = True) -> httpclient.InferInput:
    made = httpclient.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


def test_health_metadata_config(daemon: DaemonProcess) -> None:
    with client_of(daemon) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("scale")
        assert client.is_model_ready("scale", "1")
        assert not client.is_model_ready("scale", "2")
        assert not client.is_model_ready("nothing")
        server = client.get_server_metadata()
        assert server["name"] == "tensord"
        assert "system_shared_memory" in server["extensions"]
        metadata = client.get_model_metadata("scale")
        assert metadata == {
            "name": "scale",
            "versions": ["1"],
            "platform": metadata["platform"],
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
        }
        config = client.get_model_config("scale")
        assert config["name"] == "scale"
        assert config["max_batch_size"] == 8
        assert config["input"][0]["data_type"] == "TYPE_FP32"


@pytest.mark.parametrize("datatype", sorted(TENSORS))
@pytest.mark.parametrize("binary_output", [True, False])
def test_binary_tensors(daemon: DaemonProcess, datatype: str, binary_output: bool) -> None:
    if not binary_output and datatype not in JSON_DATATYPES:
        pytest.skip("FP16 and BF16 have no JSON form")
    with client_of(daemon) as client:
        answer = client.infer(
            f"echo_{datatype.lower()}",
            [tensor("x", datatype, TENSORS[datatype])],
            outputs=[httpclient.InferRequestedOutput("y", binary_data=binary_output)],
            request_id="42",
        )
        assert answer.get_response()["id"] == "42"
        assert answer.get_response()["model_version"] == "1"
        got = answer.as_numpy("y")
        assert same(got, TENSORS[datatype]) or got.tolist() == [v.decode() for v in TENSORS[datatype]]


@pytest.mark.parametrize("datatype", JSON_DATATYPES)
def test_json_tensors(daemon: DaemonProcess, datatype: str) -> None:
    values = TENSORS[datatype]
    data = [v.decode() for v in values] if datatype == "BYTES" else values.tolist()
    status, answer = daemon.infer(
        f"echo_{datatype.lower()}", [{"name": "x", "shape": [3], "datatype": datatype, "data": data}], id="j"
    )
    assert status == 200, answer
    assert answer["id"] == "j"
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("y", datatype, [3])
    if datatype == "FP32":
        assert np.array(output["data"], np.float32).tolist() == values.tolist()
    else:
        assert output["data"] == data


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_travels_in_binary_only(daemon: DaemonProcess, datatype: str) -> None:
    status, answer = daemon.infer(
        f"echo_{datatype.lower()}", [{"name": "x", "shape": [1], "datatype": datatype, "data": [1.0]}]
    )
    assert status == 400
    assert (
        answer
        == {
            "error": f"receiving {datatype} data via JSON is not supported. "
            "Please use the binary data format for input 'x'"
        }
        or datatype in answer["error"]
    )


def test_nested_json_is_flat_json(daemon: DaemonProcess) -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 8]]
    for data in (rows, [value for row in rows for value in row]):
        status, answer = daemon.infer("scale", [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": data}])
        assert status == 200
        assert answer["outputs"][0]["data"] == [3 * value + 1 for row in rows for value in row]


@pytest.mark.parametrize("datatype", sorted(TENSORS))
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_any_length(daemon: DaemonProcess, datatype: str, count: int) -> None:
    """Nothing, one element, and more than travels inline."""
    values = np.resize(TENSORS[datatype], count)
    with client_of(daemon) as client:
        answer = client.infer(f"echo_{datatype.lower()}", [tensor("x", datatype, values)])
        assert same(answer.as_numpy("y"), values)


def test_one_megabyte_and_sixteen(daemon: DaemonProcess) -> None:
    with client_of(daemon) as client:
        for count in (1 << 18, 1 << 22, 1 << 18):
            values = np.random.default_rng(count).random(count, np.float32)
            answer = client.infer("echo_fp32", [tensor("x", "FP32", values)])
            assert same(answer.as_numpy("y"), values)


def test_statistics_come_from_the_requests(daemon: DaemonProcess) -> None:
    with client_of(daemon) as client:

        def counts() -> dict[str, Any]:
            (stats,) = client.get_inference_statistics("scale")["model_stats"]
            return {
                "inference": stats["inference_count"],
                "execution": stats["execution_count"],
                "success": stats["inference_stats"]["success"]["count"],
            }

        before = counts()
        for _ in range(3):
            client.infer("scale", [tensor("x", "FP32", np.ones((2, 4), np.float32))])
        with pytest.raises(InferenceServerException):
            client.infer("scale", [tensor("x", "FP32", np.ones((2, 5), np.float32))])
        after = counts()
        assert {key: after[key] - before[key] for key in after} == {"inference": 6, "execution": 3, "success": 3}
        assert {m["name"] for m in client.get_inference_statistics()["model_stats"]} >= {"scale", "echo_fp32"}


def test_repository(daemon: DaemonProcess) -> None:
    with client_of(daemon) as client:
        index = {entry["name"]: entry for entry in client.get_model_repository_index()}
        assert index["scale"]["state"] == "READY"
        assert index["does_not_load"]["state"] == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed"):
            client.load_model("scale")


def test_many_clients_get_their_own_answers(daemon: DaemonProcess) -> None:
    """64 concurrent clients with mixed batch sizes, while another one sends nonsense."""

    def good(seed: int) -> int:
        rng = np.random.default_rng(seed)
        wrong = 0
        with client_of(daemon) as client:
            for _ in range(12):
                values = rng.random((int(rng.integers(1, 9)), 4), np.float32)
                answer = client.infer("scale", [tensor("x", "FP32", values)], request_id=str(seed))
                wrong += answer.get_response()["id"] != str(seed)
                wrong += not np.allclose(answer.as_numpy("y"), 3 * values + 1)
        return wrong

    def bad(seed: int) -> int:
        rng = np.random.default_rng(seed)
        survived = 0
        bodies = [
            b"",
            b"{",
            b'{"inputs": 3}',
            b'{"inputs": [{"name": "x", "shape": [1, 5], "datatype": "FP32", "data": [1]}]}',
        ]
        for _ in range(60):
            status, answer = daemon.request("POST", "/v2/models/scale/infer", bodies[int(rng.integers(0, 4))])
            assert status == 400, answer
            assert json.loads(answer)["error"]
            survived += 1
        return survived - 60

    with ThreadPoolExecutor(66) as pool:
        jobs = [pool.submit(good, i) for i in range(64)] + [pool.submit(bad, i) for i in range(2)]
        assert sum(job.result() for job in jobs) == 0


def test_small_requests_that_share_a_call_are_counted_and_answered_one_by_one(daemon: DaemonProcess) -> None:
    """A model without a batch dimension under many clients: every answer its own, every request an execution."""

    def counts() -> tuple[int, int]:
        (stats,) = json.loads(daemon.get("/v2/models/echo_fp32/stats")[1])["model_stats"]
        return stats["execution_count"], stats["inference_stats"]["success"]["count"]

    def ask(seed: int) -> int:
        wrong = 0
        with client_of(daemon) as client:
            for i in range(150):
                values = np.full(7, seed * 1000 + i, np.float32)
                wrong += not same(client.infer("echo_fp32", [tensor("x", "FP32", values)]).as_numpy("y"), values)
        return wrong

    before = counts()
    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(ask, range(16))) == 0
    assert [after - start for start, after in zip(before, counts(), strict=True)] == [16 * 150, 16 * 150]


async def test_asyncio_client(daemon: DaemonProcess) -> None:
    async with aioclient.InferenceServerClient(daemon.url) as client:
        assert await client.is_server_ready()
        assert await client.is_model_ready("scale")
        assert (await client.get_model_metadata("scale"))["name"] == "scale"
        for datatype, values in TENSORS.items():
            made = aioclient.InferInput("x", list(values.shape), datatype)
            made.set_data_from_numpy(values)
            answer = await client.infer(f"echo_{datatype.lower()}", [made], request_id=datatype)
            assert answer.get_response()["id"] == datatype
            assert same(answer.as_numpy("y"), values)
        assert await client.get_system_shared_memory_status() == []


def test_an_output_that_is_asked_for_twice_is_refused(daemon: DaemonProcess) -> None:
    inputs = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]
    for _ in range(2):
        status, answer = daemon.infer("scale", inputs, id="me", outputs=[{"name": "y"}, {"name": "y"}])
        assert (status, answer) == (400, {"error": "[request id: me] output 'y' already exists in request"})
    assert daemon.infer("scale", inputs, outputs=[{"name": "y"}])[0] == 200


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_who_asks_for_compressed_answers_gets_plain_ones(daemon: DaemonProcess, compression: str) -> None:
    """Answers are not compressed by default; requests may be."""
    with client_of(daemon) as client:
        values = np.ones((1, 4), np.float32)
        answer = client.infer(
            "scale",
            [tensor("x", "FP32", values)],
            request_compression_algorithm=compression,
            response_compression_algorithm=compression,
        )
        assert same(answer.as_numpy("y"), 3 * values + 1)


@pytest.mark.parametrize("datatype", JSON_DATATYPES)
def test_large_json_tensors(daemon: DaemonProcess, datatype: str) -> None:
    values = np.resize(TENSORS[datatype], 120_000)
    data = [v.decode() for v in values] if datatype == "BYTES" else values.tolist()
    inputs = [{"name": "x", "shape": [len(values)], "datatype": datatype, "data": data}]
    status, answer = daemon.infer(f"echo_{datatype.lower()}", inputs)
    assert status == 200, answer
    assert answer["outputs"][0]["shape"] == [len(values)]
    back = answer["outputs"][0]["data"]
    assert back == data if datatype == "BYTES" else same(np.array(back, values.dtype), values)
