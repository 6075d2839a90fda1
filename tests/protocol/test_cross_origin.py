"""Pages of other origins (``http.cors_origins``): preflights, and answers, whichever way a request takes."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator

import pytest

from tests.daemon_process import PATIENCE, DaemonProcess
from tests.repositories import scale_model

PAGE, OTHER = "https://page.example", "https://other.example"
INFER = "/v2/models/scale/infer"
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})


@pytest.fixture(scope="module", params=[[PAGE, "http://localhost:3000"], ["*"]], ids=["named", "all"])
def daemon(
    leaves_nothing: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[DaemonProcess]:
    models = tmp_path_factory.mktemp("models")
    scale_model(models)
    options = {"http": {"cors_origins": request.param, "max_body_byte_size": 2000}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), [models], options) as running:
        yield running


def answers(
    daemon: DaemonProcess, method: str, path: str, origin: str, body: str = "", **more: str
) -> tuple[int, dict[str, str]]:
    """Sends a request; returns status and headers, names in lower case."""
    with contextlib.closing(http.client.HTTPConnection(daemon.url, timeout=PATIENCE)) as connection:
        connection.request(method, path, body or None, ({"Origin": origin} if origin else {}) | more)
        answer = connection.getresponse()
        answer.read()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}


def allowed(daemon: DaemonProcess, origin: str) -> str | None:
    return "*" if daemon.sections["http"]["cors_origins"] == ["*"] else PAGE if origin == PAGE else None


@pytest.mark.parametrize("origin", [PAGE, OTHER])
@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v2/models/scale", "", 200),
        ("POST", INFER, BODY, 200),
        ("POST", INFER, "{}", 400),
        ("POST", "/v2/models/nope/infer", BODY, 404),
        ("POST", "/v2/repository/index", "{}", 200),
        # What is refused before it is a request.
        ("POST", INFER, " " * 3000, 413),
        ("POST", f"{INFER}?{'a' * 70_000}", BODY, 431),
    ],
)
def test_who_may_read_an_answer(
    daemon: DaemonProcess, origin: str, method: str, path: str, body: str, status: int
) -> None:
    for _ in range(3):  # known by now, it takes a shorter way
        found, headers = answers(daemon, method, path, origin, body)
        assert (found, headers.get("access-control-allow-origin")) == (status, allowed(daemon, origin))
        if allowed(daemon, origin):
            assert headers["access-control-expose-headers"] == "Inference-Header-Content-Length"
        if allowed(daemon, origin) == PAGE:
            assert headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in answers(daemon, method, path, "", body)[1]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
@pytest.mark.parametrize("origin", [PAGE, OTHER])
def test_preflights(daemon: DaemonProcess, origin: str, method: str) -> None:
    asked = {
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "content-type,inference-header-content-length",
    }
    status, headers = answers(daemon, "OPTIONS", INFER, origin, **asked)
    assert (status == 200) == (allowed(daemon, origin) is not None)
    assert headers.get("access-control-allow-origin") == allowed(daemon, origin)
    if status == 200:
        assert "inference-header-content-length" in headers["access-control-allow-headers"]
        assert method in headers["access-control-allow-methods"]
