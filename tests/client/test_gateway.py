"""Answers that the client's gateways have in common, such as 503 while the daemon is gone."""

from __future__ import annotations

import contextlib
import http.client
import tempfile
from pathlib import Path

import pytest

from tests.client.test_client import Server, usual
from tests.daemon_process import PATIENCE
from tests.openpi_gateway import GatewayProcess

_UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


@pytest.mark.parametrize(
    ("module", "method", "path"), [("openpi", "GET", "/m"), ("tesseract", "GET", "/m/openapi.json")]
)
def test_a_daemon_that_is_gone_is_no_fault_of_the_gateway(module: str, method: str, path: str) -> None:
    with tempfile.TemporaryDirectory(prefix="tensord-test-") as folder, contextlib.ExitStack() as opened:
        server = Server(Path(folder, "http.sock"), usual)
        opened.callback(server.close)
        arguments = (server.address.path, "--patience", "0.01")
        gateway = opened.enter_context(GatewayProcess(*arguments, module=f"tensord_client.{module}"))
        server.close()
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE)
        opened.callback(connection.close)
        connection.request(method, path, headers=_UPGRADE if module == "openpi" else {})
        answer = connection.getresponse()
        assert (answer.status, b"no server answers at (a path)" in answer.read()) == (503, True)
