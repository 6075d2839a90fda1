"""tritonclient's own compression, both ways, sync and aio."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
import tritonclient.http.aio as aioclient

from tests.daemon_process import DaemonProcess

CODINGS = ["gzip", "deflate"]


def inputs_of(values: np.ndarray[Any, Any], binary: bool) -> list[httpclient.InferInput]:
    made = httpclient.InferInput("x", list(values.shape), "FP32")
    made.set_data_from_numpy(values, binary_data=binary)
    return [made]


@pytest.mark.parametrize("request_coding", [None, *CODINGS])
@pytest.mark.parametrize("answer_coding", [None, *CODINGS])
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("size", [3, 200_000])
def test_sync(
    daemon: DaemonProcess, request_coding: str | None, answer_coding: str | None, binary: bool, size: int
) -> None:
    values = np.arange(size, dtype=np.float32)
    with httpclient.InferenceServerClient(daemon.url) as client:
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
async def test_aio(daemon: DaemonProcess, request_coding: str | None, answer_coding: str | None) -> None:
    values = np.arange(200_000, dtype=np.float32)
    async with aioclient.InferenceServerClient(daemon.url) as client:
        answer = await client.infer(
            "echo_fp32",
            inputs_of(values, True),
            request_compression_algorithm=request_coding,
            response_compression_algorithm=answer_coding,
        )
        np.testing.assert_array_equal(answer.as_numpy("y"), values)
