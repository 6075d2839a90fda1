"""Metadata as programs write it, which every gRPC library takes: blanks at an end, names that belong to HTTP/1.1."""

from __future__ import annotations

import pytest
import tritonclient.grpc as grpcclient

from tests.daemon_process import DaemonProcess
from tests.protocol.test_grpc_client import scale_input


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("x-tag", value) for value in (" a", "a ", " a b ", " ")),
        *((name, "x") for name in ("host", "connection", "keep-alive", "upgrade", "transfer-encoding")),
    ],
)
def test_it_breaks_no_call(daemon: DaemonProcess, name: str, value: str) -> None:
    with grpcclient.InferenceServerClient(daemon.grpc_url) as client:
        for _ in range(2):
            answer = client.infer("scale", scale_input(2), headers={name: value})
            assert answer.as_numpy("y").tolist() == [[7.0] * 4]
