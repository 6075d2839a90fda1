"""Every endpoint but infer, through a real front: what it answers itself, what it asks the supervisor, what it refuses."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from tensord.shm.control_records import ModelGone, Readiness
from tensord.shm.operations import (
    LoadModel,
    ModelStatistics,
    Operation,
    RegionStatus,
    RegisterCudaRegion,
    RegisterSystemRegion,
    RepositoryIndex,
    UnloadModel,
    UnregisterRegion,
)
from tests.fakes import Client, FrontProcess, front_process


@pytest.fixture(scope="module")
def front() -> Iterator[FrontProcess]:
    with front_process(http={"port": 0}, server_name="named") as front:
        front.model(front.worker())
        yield front


@pytest.fixture
def client(front: FrontProcess) -> Iterator[Client]:
    with front.client() as client:
        yield client


def test_health(client: Client) -> None:
    bodies = {
        "/v2/health/live": b'{"live":true}',
        "/v2/health/ready": b'{"ready":true}',
        "/v2/models/echo/ready": b'{"name":"echo","ready":true}',
        "/v2/models/echo/versions/1/ready": b'{"name":"echo","ready":true}',
    }
    for path, body in bodies.items():
        answer = client.ask("GET", path)
        assert (answer.status, answer.body) == (200, body), path


@pytest.mark.parametrize("path", ["/v2/models/nope/ready", "/v2/models/echo/versions/7/ready"])
def test_a_model_that_is_not_ready(client: Client, path: str) -> None:
    answer = client.ask("GET", path)
    assert (answer.status, answer.error) == (400, "Model version not ready")


def test_server_metadata(client: Client) -> None:
    answer = json.loads(client.ask("GET", "/v2").body)
    assert list(answer) == ["name", "version", "extensions"]
    assert answer["name"] == "named"
    assert "binary_tensor_data" in answer["extensions"]


def test_model_metadata_and_configuration(client: Client, front: FrontProcess) -> None:
    front.model(front.workers[0], version=3, pure=True)
    for path, versions in (("/v2/models/echo", ["1", "3"]), ("/v2/models/echo/versions/1?x=y", ["1"])):
        given = client.ask("GET", path)
        answer = json.loads(given.body)
        assert list(answer) == ["name", "versions", "platform", "inputs", "outputs"]
        assert (answer["name"], answer["versions"]) == ("echo", versions)
        assert given.headers.get("tensord-pure") == ("1" if len(versions) == 2 else None)
    assert json.loads(client.ask("GET", "/v2/models/echo/config").body)["name"] == "echo"
    front.send(ModelGone("echo", 3))
    front.sync()


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v2/models/nope", 404, "Request for unknown model: 'nope' is not found"),
        ("GET", "/v2/models/echo/versions/9", 404, "Request for unknown model: 'echo' version 9 is not found"),
        ("GET", "/v2/models/echo/versions/x", 404, "Not Found"),
        ("GET", "/v2/models/echo/versions/-1", 404, "Not Found"),
        ("GET", "/v2/models/echo/versions/\u00b2", 404, "Not Found"),
        ("GET", "/nowhere", 404, "Not Found"),
        ("GET", "/v2/", 404, "Not Found"),
        ("GET", "/v2/health/live/", 404, "Not Found"),
        ("POST", "/v2/health/live", 405, "Method Not Allowed"),
        ("GET", "/v2/models/echo/infer", 405, "Method Not Allowed"),
        ("PUT", "/v2/models/echo/infer", 405, "Method Not Allowed"),
        ("GET", "/v2/repository/index", 405, "Method Not Allowed"),
    ],
)
def test_what_is_not_there(client: Client, method: str, path: str, status: int, text: str) -> None:
    path = path.encode().decode("latin-1") if path.isascii() else "/v2/models/echo/versions/%C2%B2"
    answer = client.ask(method, path)
    assert (answer.status, answer.error) == (status, text)
    assert answer.headers["content-type"] == "application/json"
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v2/health/live", "GET, HEAD"),
        ("POST", "/v2/models/echo/ready", "GET, HEAD"),
        ("POST", "/v2/openapi.yaml", "GET, HEAD"),
        ("POST", "/v2/models/ready", "GET"),
        ("PUT", "/v2/models/echo/parameters/s", "DELETE, GET, POST"),
        ("DELETE", "/v2", "GET"),
        ("GET", "/v2/models/echo/infer", "POST"),
        ("PUT", "/v2/logging", "GET, POST"),
        ("OPTIONS", "/v2/repository/index", "POST"),
    ],
)
def test_the_methods_of_a_path_are_said(client: Client, method: str, path: str, allowed: str) -> None:
    answer = client.ask(method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    "path", ["/v2/health/live", "/v2/health/ready", "/v2/models/echo/ready", "/v2/models/nope/ready"]
)
def test_head_of_a_health_path_is_its_get_without_a_body(client: Client, front: FrontProcess, path: str) -> None:
    # That all fronts know of the models is asked once, until something changes.
    front.send(Readiness(False, 1, 1, ("echo",)))
    front.send(Readiness(True, 1))
    client.request("GET", "/v2/health/ready")
    front.answer_call()
    assert client.answer().status == 200
    expected = client.ask("GET", path)
    for _ in range(2):  # nothing of the first is left before the second
        client.send(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = client._until(b"\r\n\r\n").lower()
        assert head.startswith(b"http/1.1 %d " % expected.status)
        assert b"content-length: %s\r\n" % expected.headers["content-length"].encode() in head
    assert client.ask("GET", path).status == expected.status


def test_head_is_refused_elsewhere(client: Client) -> None:
    client.send(b"HEAD /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
    head = client._until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405 ")
    assert b"GET\r\n" in head


_LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
_INFER = b"POST /v2/models/x/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n{\nG}"
#: Large, and refused with 400 once it is whole.
_LARGE = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\n\r\n" + b"\r" * (1 << 20)


@pytest.mark.parametrize(
    "packets", [[b"\r\n" + _LIVE], [_LIVE + b"\r\n" + _LIVE], [b"\r", b"\n" + _LIVE], [_LIVE + b"\r\n", _LIVE]]
)
def test_an_empty_line_before_a_request_is_passed_over(client: Client, packets: list[bytes]) -> None:
    """The line is skipped, as RFC 9112 asks."""
    for packet in packets:
        client.send(packet)
        for _ in range(packet.count(_LIVE)):
            assert client._until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
            client._until(b"}")


@pytest.mark.parametrize(
    "before",
    [b"", _LIVE, _INFER, b"\r\n", _LIVE + b"\r\n", _LARGE],
    ids=["first", "head", "body", "empty", "both", "large body"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["in one packet", "in the next one"])
@pytest.mark.parametrize("feeds", [b"\n", b"\n\n"])
def test_a_line_feed_is_no_empty_line(client: Client, before: bytes, apart: bool, feeds: bytes) -> None:
    """Wherever packets end, and whatever came before it; one within a body is the body's."""
    requests = before.count(b"HTTP/1.1")
    for packet in [before, feeds + _LIVE] if apart else [before + feeds + _LIVE]:
        if packet:
            client.send(packet)
    for _ in range(requests):
        assert not client._until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 ") or before.startswith(_LIVE)
        client._until(b"}")
    assert client._until(b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")


INDEX, LOAD, UNLOAD = "/v2/repository/index", "/v2/repository/models/a%20b/load", "/v2/repository/models/m/unload"
CUDA = "/v2/cudasharedmemory/region/r/register"
REGIONS = "/v2/systemsharedmemory"


@pytest.mark.parametrize(
    ("method", "path", "body", "operation"),
    [
        ("GET", "/v2/models/stats", b"", ModelStatistics()),
        ("GET", "/v2/models/echo/stats", b"", ModelStatistics("echo")),
        ("GET", "/v2/models/echo/versions/2/stats", b"", ModelStatistics("echo", 2)),
        ("POST", INDEX, b"", RepositoryIndex()),
        ("POST", INDEX, b'{"ready":true}', RepositoryIndex(True)),
        ("POST", LOAD, b"", LoadModel("a b")),
        ("POST", LOAD, b'{"parameters":{"config":"{}"}}', LoadModel("a b", "{}")),
        ("POST", LOAD, b'{"parameters":{"file:1/m.py":"YWJj"}}', LoadModel("a b", "", {"1/m.py": b"abc"})),
        ("POST", UNLOAD, b"{}", UnloadModel("m")),
        ("POST", UNLOAD, b'{"parameters":{"unload_dependents":true}}', UnloadModel("m", True)),
        (
            "POST",
            f"{REGIONS}/region/r/register",
            b'{"key":"/k","byte_size":8,"x":1}',
            RegisterSystemRegion("r", "/k", 0, 8),
        ),
        (
            "POST",
            f"{REGIONS}/region/r/register",
            b'{"key":"/k","byte_size":8,"offset":4}',
            RegisterSystemRegion("r", "/k", 4, 8),
        ),
        (
            "POST",
            CUDA,
            b'{"raw_handle":{"b64":"' + base64.b64encode(bytes(range(64))) + b'"},"device_id":1,"byte_size":8}',
            RegisterCudaRegion("r", bytes(range(64)), 1, 8),
        ),
        ("POST", f"{REGIONS}/region/r/unregister", b"ignored", UnregisterRegion("system", "r")),
        ("POST", f"{REGIONS}/unregister", b"", UnregisterRegion("system", "")),
        ("POST", "/v2/cudasharedmemory/unregister", b"", UnregisterRegion("cuda", "")),
        ("GET", f"{REGIONS}/status", b"", RegionStatus("system", "")),
        ("GET", f"{REGIONS}/region/r.-_/status", b"", RegionStatus("system", "r.-_")),
        ("GET", "/v2/cudasharedmemory/region/r/status", b"", RegionStatus("cuda", "r")),
    ],
)
def test_what_the_supervisor_is_asked(
    client: Client, front: FrontProcess, method: str, path: str, body: bytes, operation: Operation
) -> None:
    for code, status in (("", 200), ("NOT_FOUND", 404), ("UNAVAILABLE", 503), ("NEVER_HEARD", 400)):
        client.request(method, path, body)
        call = front.answer_call(code, "so it is", b'{"a":1}')
        assert call.operation == operation
        answer = client.answer()
        assert answer.status == status
        if code:
            assert answer.error == "so it is"
        else:
            assert answer.body in (b"", b'{"a":1}')


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (INDEX, b"{", "failed to parse the request JSON buffer"),
        (INDEX, b'{"ready":1}', "attempt to access JSON non-boolean as boolean"),
        (INDEX, b"\xff", "failed to parse the request JSON buffer"),
        (INDEX, b'{"a":"\xff"}', "failed to parse the request JSON buffer"),
        (INDEX, b"[" * 100_000, "failed to parse the request JSON buffer"),
        (LOAD, b'{"parameters":[]}', "attempt to get members for non-object"),
        (LOAD, b'{"parameters":{"config":{}}}', "'config' should be a string"),
        (LOAD, b'{"parameters":{"file:a":"*"}}', "'file:a' should be base64 text"),
        (LOAD, b'{"parameters":{"x":1}}', "unrecognized load parameter 'x'"),
        (UNLOAD, b'{"parameters":{"unload_dependents":1}}', "'unload_dependents' should be a boolean"),
        (UNLOAD, b'{"parameters":1}', "attempt to get members for non-object"),
        (f"{REGIONS}/register", b"{}", "'region name' is necessary to register system shared memory region"),
        (f"{REGIONS}/region/r/register", b"", "The document is empty. at 0"),
        (f"{REGIONS}/region/r/register", b'{"key":5}', "attempt to access JSON non-string as string"),
        (f"{REGIONS}/region/r/register", b"[]", "Shared memory register request has no 'key' field"),
        (f"{REGIONS}/region/r/register", b'{"key":"k"}', "Shared memory register request has no 'byte_size' field"),
        (
            f"{REGIONS}/region/r/register",
            b'{"key":"k","byte_size":-1}',
            "attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            f"{REGIONS}/region/r/register",
            b'{"key":"k","byte_size":1e3}',
            "attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (
            f"{REGIONS}/region/r/register",
            b'{"key":"k","byte_size":1,"offset":true}',
            "attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (CUDA, b"{}", "Shared memory register request has no 'raw_handle' field"),
        (CUDA, b'{"raw_handle":"AAAA"}', "attempt to access non-existing object member 'b64'"),
        (CUDA, b'{"raw_handle":{"b64":"A"}}', "Shared memory register request has no 'byte_size' field"),
        (CUDA, b'{"raw_handle":{"b64":"A"},"byte_size":1}', "attempt to access non-existing object member 'device_id'"),
        (CUDA, b'{"raw_handle":{"b64":"A"},"byte_size":1,"device_id":-1}', "non-unsigned-integer as unsigned-integer"),
        (
            CUDA,
            b'{"raw_handle":{"b64":"A"},"byte_size":true,"device_id":0}',
            "non-unsigned-integer as unsigned-integer",
        ),
        (CUDA, b'{"raw_handle":{"b64":"AAAA"},"byte_size":1,"device_id":0}', "must be a valid base64 encoded"),
        (CUDA, b'{"raw_handle":{"b64":"*"},"byte_size":1,"device_id":0}', "must be a valid base64 encoded"),
        (CUDA, b'{"raw_handle":{"b64":7},"byte_size":1,"device_id":0}', "must be a valid base64 encoded"),
    ],
)
def test_what_is_refused_before_anybody_is_asked(client: Client, path: str, body: bytes, text: str) -> None:
    answer = client.ask("POST", path, body)
    assert (answer.status, text in answer.error) == (400, True), answer


def test_repositories_have_no_names(client: Client) -> None:
    for operation in ("load", "unload"):
        answer = client.ask("POST", f"/v2/repository/mine/models/m/{operation}", b"{}")
        assert (answer.status, answer.error) == (501, "'repository_name' specification is not supported")


def test_a_load_may_be_larger(client: Client, front: FrontProcess) -> None:
    """Files travel in it."""
    content = bytes(3 << 20)
    given = {"config": "{}", "file:1/model.py": base64.b64encode(content).decode()}
    client.request("POST", LOAD, json.dumps({"parameters": given}).encode())
    assert front.answer_call("", "", b"").operation == LoadModel("a b", "{}", {"1/model.py": content})
    assert client.answer().status == 200


def test_a_body_over_the_limit(client: Client) -> None:
    answer = client.ask("POST", INDEX, bytes((1 << 20) + 1))
    assert (answer.status, str(1 << 20) in answer.error) == (413, True)


def test_the_server_is_ready_when_the_supervisor_says_so(client: Client, front: FrontProcess) -> None:
    front.send(Readiness(False, 2, 1, ("other",)))
    client.request("GET", "/v2/health/ready")
    answer = client.answer()
    said = {"ready": False, "error": "1 of 2 models are not served: other"}
    assert (answer.status, json.loads(answer.body)) == (400, said)
    front.send(Readiness(True, 2))
    client.request("GET", "/v2/health/ready")
    front.answer_call()
    answer = client.answer()
    assert (answer.status, answer.body) == (200, b'{"ready":true}')
