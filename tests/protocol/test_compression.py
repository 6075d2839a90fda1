"""tritonclient's own compression, both ways, sync and aio; answers only where the operator wants it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.http as httpclient
import tritonclient.http.aio as aioclient

from tests import repositories
from tests.daemon_process import DaemonOf, DaemonProcess

CODINGS = ["gzip", "deflate"]


@pytest.fixture(scope="module")
def compressing(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    """Runs a daemon that is configured to compress answers."""
    repository = tmp_path_factory.mktemp("repository")
    repositories.echo_models(repository, ["FP32"])
    options = {"http": {"response_compression": "medium"}}
    return daemon_of(repository, options)


def inputs_of(values: np.ndarray[Any, Any], binary: bool) -> list[httpclient.InferInput]:
    made = httpclient.InferInput("x", list(values.shape), "FP32")
    made.set_data_from_numpy(values, binary_data=binary)
    return [made]


def asked() -> list[Any]:
    """Returns sizes, forms and codings; of long texts, which take longest, each coding of either direction once."""
    once = {(None, None), ("gzip", "deflate"), ("deflate", "gzip")}
    every = itertools.product([3, 200_000], [True, False], [None, *CODINGS], [None, *CODINGS])
    release = pytest.mark.release("long texts with each pair of codings; an ordinary run has each coding either way")
    return [pytest.param(*one, marks=[] if one[0] == 3 or one[1] or one[2:] in once else release) for one in every]


@pytest.mark.parametrize(("size", "binary", "answer_coding", "request_coding"), asked())
def test_sync(
    compressing: DaemonProcess, request_coding: str | None, answer_coding: str | None, binary: bool, size: int
) -> None:
    values = np.arange(size, dtype=np.float32)
    with httpclient.InferenceServerClient(compressing.url) as client:
        for _ in range(2):
            answer = client.infer(
                "echo_fp32",
                inputs_of(values, binary),
                outputs=[httpclient.InferRequestedOutput("y", binary_data=binary)],
                request_compression_algorithm=request_coding,
                response_compression_algorithm=answer_coding,
            )
            np.testing.assert_array_equal(answer.as_numpy("y"), values)


@pytest.mark.parametrize("request_coding", [None, *CODINGS])
@pytest.mark.parametrize("answer_coding", [None, *CODINGS])
async def test_aio(compressing: DaemonProcess, request_coding: str | None, answer_coding: str | None) -> None:
    values = np.arange(200_000, dtype=np.float32)
    async with aioclient.InferenceServerClient(compressing.url) as client:
        answer = await client.infer(
            "echo_fp32",
            inputs_of(values, True),
            request_compression_algorithm=request_coding,
            response_compression_algorithm=answer_coding,
        )
        np.testing.assert_array_equal(answer.as_numpy("y"), values)


def test_requests_asks_by_itself_and_gets_it_only_where_it_is_on(
    daemon: DaemonProcess, compressing: DaemonProcess
) -> None:
    body = {"inputs": [{"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]}]}
    for server, coding in ((daemon, None), (compressing, "gzip")):
        with requests.Session() as session:
            assert "gzip" in session.headers["Accept-Encoding"]
            for _ in range(3):
                answer = session.post(f"http://{server.url}/v2/models/echo_fp32/infer", json=body)
                assert answer.headers.get("Content-Encoding") == coding
                assert answer.json()["outputs"][0]["data"] == [1, 2, 3]
