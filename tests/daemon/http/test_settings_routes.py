"""Settings over HTTP: what is asked of the supervisor, and what is refused in Triton's words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensord.shm.operations import ChangeLog, ChangeTrace, Operation
from tests.fakes import Client, FrontProcess, front_process

LOGGING, TRACE, MODEL_TRACE = "/v2/logging", "/v2/trace/setting", "/v2/models/m/trace/setting"
UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NO_FILE = "log file location can not be updated through network protocol"


@pytest.fixture(scope="module")
def front() -> Iterator[FrontProcess]:
    with front_process() as front:
        yield front


@pytest.fixture
def client(front: FrontProcess) -> Iterator[Client]:
    with front.client() as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "body", "operation"),
    [
        ("GET", LOGGING, b"", ChangeLog()),
        ("POST", LOGGING, b"{}", ChangeLog()),
        ("POST", LOGGING, b"[]", ChangeLog()),
        ("POST", LOGGING, b'{"log_info":null,"log_file":null,"log_colour":7}', ChangeLog()),
        (
            "POST",
            LOGGING,
            b'{"log_info":false,"log_warning":true,"log_error":false,"log_verbose_level":3,"log_format":"ISO8601"}',
            ChangeLog(False, True, False, 3, "ISO8601"),
        ),
        (
            "POST",
            LOGGING,
            b'{"log_format":"json","log_verbose_level":4294967295}',
            ChangeLog(None, None, None, 2**32 - 1, "json"),
        ),
    ],
)
def test_what_the_supervisor_is_asked(
    client: Client, front: FrontProcess, method: str, path: str, body: bytes, operation: Operation
) -> None:
    client.request(method, path, body)
    assert front.answer_call(result=b'{"a":1}').operation == operation
    answer = client.answer()
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b'{"a":1}', "application/json")


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (LOGGING, b"", 400, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (LOGGING, b"{", 400, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        (LOGGING, b"5", 400, "failed to parse the request JSON buffer: an object is expected"),
        (LOGGING, b'{"log_info":1}', 400, "attempt to access JSON non-boolean as boolean"),
        (LOGGING, b'{"log_verbose_level":-1}', 400, UNSIGNED),
        (LOGGING, b'{"log_verbose_level":true}', 400, UNSIGNED),
        (
            LOGGING,
            b'{"log_verbose_level":4294967296}',
            400,
            "'log_verbose_level' is 4294967296, at most 4294967295 is allowed",
        ),
        (LOGGING, b'{"log_format":1}', 400, "attempt to access JSON non-string as string"),
        (LOGGING, b'{"log_format":"xml"}', 503, "invalid argument for --log_format, got: xml"),
        (TRACE, b"{", 400, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        (TRACE, b'{"trace_level":"OFF"}', 400, "attempt to access JSON non-array as array"),
        (TRACE, b'{"trace_level":[1]}', 400, "attempt to access JSON non-string as string"),
        (TRACE, b'{"trace_rate":5}', 400, "attempt to access JSON non-string as string"),
        (TRACE, b'{"trace_file":null}', 501, "trace file location can not be updated through network protocol"),
        (LOGGING, b'{"log_file":"/etc/passwd"}', 501, NO_FILE),
        (LOGGING, b'{"log_file":"","log_info":1}', 501, NO_FILE),
    ],
)
def test_what_is_refused_before_anybody_is_asked(
    client: Client, path: str, body: bytes, status: int, text: str
) -> None:
    answer = client.ask("POST", path, body)
    assert (answer.status, answer.error) == (status, text)


@pytest.mark.parametrize("body", [b"{", b'{"trace_file":"x"}', b'{"trace_rate":"x"}'])
def test_a_model_is_looked_for_before_its_settings_are_read(client: Client, front: FrontProcess, body: bytes) -> None:
    client.request("POST", MODEL_TRACE, body)
    unknown = "Request for unknown model : m"
    assert front.answer_call(code="INVALID_ARGUMENT", message=unknown).operation == ChangeTrace("m")
    answer = client.answer()
    assert (answer.status, answer.error) == (400, unknown)


def test_other_methods(client: Client) -> None:
    assert client.ask("DELETE", LOGGING).status == 405
