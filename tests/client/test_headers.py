"""Headers that a client was given go with what it asks over HTTP: they are the keys of restricted calls."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensord_client

from tests.client.conftest import clients_socket
from tests.daemon_process import PATIENCE, DaemonProcess
from tests.openpi_gateway import GatewayProcess
from tests.repositories import write_model

KEY = {"The-Key": "open sesame"}
_X = {"x": np.float32([3])}
_SOURCE = """
import numpy as np

inputs = outputs = {"x": "FP32[1]"}

def create(path, config, device):
    return (lambda params, inputs: {"x": params["factor"] * inputs["x"]}), {"factor": np.float32(2)}
"""


@pytest.mark.parametrize("group", ["inference", "parameters"])
def test_the_keys_of_restricted_calls(tmp_path: Path, group: str) -> None:
    """Over TCP, and where the clients' socket takes no such call because nobody can show a key there."""
    write_model(tmp_path / "models", "m", _SOURCE)
    options: dict[str, Any] = {
        "clients": {"socket": clients_socket(tmp_path)},
        "http": {"restricted_api": [f"{group}:the-key=open sesame"]},
    }
    with DaemonProcess(tmp_path, [tmp_path / "models"], options) as daemon:
        for address in (daemon.url, clients_socket(tmp_path)):
            for headers in (None, {"the-key": "sesame"}, {**KEY, "and": "more"}):
                with tensord_client.connect(address, headers=headers) as client:
                    model = client.model("m", timeout=60)

                    def ask(model: tensord_client.Model = model) -> int:
                        if group == "inference":
                            return int(model(_X)["x"][0])
                        model.parameters.update({"factor": np.float32(5)})
                        return len(model.parameters.list())

                    if headers and len(headers) > 1:
                        assert ask() == (6 if group == "inference" else 1)
                        continue
                    with pytest.raises(tensord_client.ServingError, match=r"restricted|need a key"):
                        ask()


async def test_they_are_sent_from_an_event_loop_too(tmp_path: Path) -> None:
    write_model(tmp_path / "models", "m", _SOURCE)
    restricted = {"http": {"restricted_api": ["inference,metadata,model-config:the-key=open sesame"]}}
    with DaemonProcess(tmp_path, [tmp_path / "models"], restricted) as daemon:
        async with await tensord_client.connect_async(daemon.url, headers=KEY) as client:
            assert (await (await client.model("m", timeout=60))(_X))["x"] == 6
        async with await tensord_client.connect_async(daemon.url) as client:
            with pytest.raises(tensord_client.ServingError, match="expecting header 'the-key'"):
                await client.model("m", timeout=60)


@pytest.mark.parametrize(
    ("name", "value"), [("a b", "c"), ("", "c"), ("a", ""), ("a", "b\r\nc: d"), ("a", "\u20ac"), ("a:", "b")]
)
def test_what_is_no_header_is_refused(name: str, value: str) -> None:
    with pytest.raises(tensord_client.InvalidArgument, match="is no header"):
        tensord_client.connect("localhost:1", headers={name: value})


@pytest.mark.parametrize("name", ["Content-Length", "transfer-encoding", "HOST", "Expect", "Tensord-Sequence"])
def test_a_header_that_the_client_writes_itself_is_refused(name: str) -> None:
    with pytest.raises(tensord_client.InvalidArgument, match=f"'{name}' is a header that the client writes by itself"):
        tensord_client.connect("localhost:1", headers={name: "1"})


@pytest.mark.parametrize("form", ["The-Key:open sesame", "the-key: open sesame"])
def test_a_gateway_sends_them(tmp_path: Path, form: str) -> None:
    write_model(tmp_path / "models", "m", _SOURCE)
    restricted = {"http": {"restricted_api": ["inference,metadata,model-config:the-key=open sesame"]}}
    with DaemonProcess(tmp_path, [tmp_path / "models"], restricted) as daemon:
        content = base64.b64encode(_X["x"].tobytes()).decode()
        values = {"shape": [1], "dtype": "float32", "data": {"encoding": "base64", "buffer": content}}
        body = json.dumps({"inputs": {"x": values}})
        for more, status in (((), 503), (("--header", form), 200)):
            with GatewayProcess(daemon.url, *more, module="tensord_client.tesseract") as gateway:
                connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE)
                with contextlib.closing(connection):
                    connection.request("POST", "/m/apply", body)
                    answer = connection.getresponse()
                    assert (answer.status, b"restricted" in answer.read()) == (status, status != 200)
