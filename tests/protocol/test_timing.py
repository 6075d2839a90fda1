"""Tests that a client can ask over HTTP how long a request waited and was computed, and what was copied for it."""

from __future__ import annotations

import http.client
import json
from typing import Any

import numpy as np
import pytest

from tests.daemon_process import PATIENCE, DaemonOf, DaemonProcess
from tests.repositories import echo_models, scale_model

Array = np.ndarray[Any, Any]
FIELDS = ("queue-ns", "compute-ns", "copied-bytes")


@pytest.fixture(scope="module")
def daemon(daemon_of: DaemonOf, tmp_path_factory: pytest.TempPathFactory) -> DaemonProcess:
    repository = tmp_path_factory.mktemp("models")
    scale_model(repository)
    echo_models(repository, ("INT64",))
    options = {"http": {"response_compression": "low"}}
    return daemon_of(repository, options)


def ask(
    connection: http.client.HTTPConnection, model: str, values: Array, **fields: str
) -> tuple[int, dict[str, str], bytes]:
    datatype = {"float32": "FP32", "int64": "INT64"}[values.dtype.name]
    tensor = {
        "name": "x",
        "datatype": datatype,
        "shape": values.shape,
        "parameters": {"binary_data_size": values.nbytes},
    }
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    said = {
        "Inference-Header-Content-Length": str(len(text)),
        **{name.replace("_", "-"): each for name, each in fields.items()},
    }
    connection.request("POST", f"/v2/models/{model}/infer", text + values.tobytes(), said)
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def took(fields: dict[str, str]) -> dict[str, int]:
    return {
        name: int(value)
        for name, _, value in (each.strip().partition("=") for each in fields["tensord-timing"].split(","))
    }


@pytest.mark.parametrize(
    ("model", "values"),
    [("scale", np.ones((2, 4), np.float32)), ("echo_int64", np.arange(1 << 17))],
    ids=["small", "large"],
)
@pytest.mark.parametrize(
    "also", [{}, {"Accept_Encoding": "gzip"}, {"Connection": "close"}], ids=["plain", "compressed", "last"]
)
def test_who_asks_is_told(daemon: DaemonProcess, model: str, values: Array, also: dict[str, str]) -> None:
    """A repeated request takes other paths than the first one, in the front and in the worker."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE)
    for _ in range(5):
        status, fields, body = ask(connection, model, values, Tensord_Timing="1", **also)
        assert status == 200
        assert tuple(took(fields)) == FIELDS
        assert took(fields)["compute-ns"] > 0
        assert len(body) > 0
        status, fields, again = ask(connection, model, values, **also)
        assert (status, "tensord-timing" in fields) == (200, False)
        assert again == body
    connection.close()


def test_an_error_says_nothing(daemon: DaemonProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE)
    for _ in range(3):
        status, fields, _ = ask(connection, "scale", np.ones((2, 5), np.float32), Tensord_Timing="1")
        assert (status, "tensord-timing" in fields) == (400, False)
    connection.close()


def test_beside_other_fields(daemon: DaemonProcess) -> None:
    """Heads are remembered without the fields that change nothing; this one does."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE)
    for number in range(6):
        asks = {"tensord_timing": ""} if number % 2 else {}
        _, fields, _ = ask(connection, "scale", np.ones((1, 4), np.float32), X_Number=str(number), **asks)
        assert ("tensord-timing" in fields) == bool(number % 2)
    connection.close()
