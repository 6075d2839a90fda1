"""The stock synchronous and asyncio HTTP clients: everything they offer that this server serves."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.daemon_process import DaemonProcess
from tests.protocol.tensors import TENSORS, same


def client_of(daemon: DaemonProcess, **options: Any) -> httpclient.InferenceServerClient:
    return httpclient.InferenceServerClient(daemon.url, **options)


def tensor(name: str, datatype: str, values: Any, binary: bool = True) -> httpclient.InferInput:
    made = httpclient.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values, binary_data=binary)
    return made


@pytest.mark.parametrize("datatype", sorted(TENSORS))
@pytest.mark.parametrize("count", [0, 1, 5000])
def test_any_length(daemon: DaemonProcess, datatype: str, count: int) -> None:
    """Nothing, one element, and more than travels inline."""
    values = np.resize(TENSORS[datatype], count)
    with client_of(daemon) as client:
        answer = client.infer(f"echo_{datatype.lower()}", [tensor("x", datatype, values)])
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
