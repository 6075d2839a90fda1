"""Pushes of parameters over HTTP, through a real front: what it makes of a body, what it refuses, what it gives back."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensord.shm.operations import (
    DropParameters,
    FileSource,
    LeafPlace,
    LeavesSource,
    ListParameters,
    MemorySource,
    Operation,
    PushParameters,
    RegionSource,
    RevertParameters,
)
from tests.fakes import Client, FrontProcess, front_process

MAIN = "/v2/models/m/parameters/main"
LIMIT = 1 << 20
LEAVES = '{"leaves":{"a.w":{"region":"r","byte_size":8,"datatype":"FP32","shape":[2]}},"partial":true}'


@pytest.fixture(scope="module")
def front() -> Iterator[FrontProcess]:
    with front_process(http={"port": 0}, workers={"max_parameter_byte_size": LIMIT}) as front:
        yield front


@pytest.fixture
def client(front: FrontProcess) -> Iterator[Client]:
    with front.client() as client:
        yield client


def descriptors_of(front: FrontProcess) -> list[str]:
    """Returns the front's open descriptors that are memory for parameters."""
    folder = Path(f"/proc/{front.process.pid}/fd")
    names = []
    for entry in folder.iterdir():
        try:
            names.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    return [name for name in names if "tensord-parameters" in name]


@pytest.mark.parametrize(
    ("method", "path", "body", "operation"),
    [
        ("POST", MAIN, '{"file":"p.npz"}', PushParameters("m", 0, "main", FileSource("p.npz"))),
        (
            "POST",
            "/v2/models/m/versions/3/parameters/customer-7",
            '{"region":"r","offset":8,"byte_size":64,"number":17,"check_finite":true,"move_sequences":true}',
            PushParameters("m", 3, "customer-7", RegionSource("r", 8, 64), 17, check_finite=True, move_sequences=True),
        ),
        (
            "POST",
            MAIN,
            LEAVES,
            PushParameters("m", 0, "main", LeavesSource({"a.w": LeafPlace("r", 0, 8, "FP32", (2,))}), partial=True),
        ),
        ("GET", "/v2/models/m/parameters", "", ListParameters("m")),
        ("GET", "/v2/models/m/versions/2/parameters/a", "", ListParameters("m", 2, "a")),
        ("DELETE", "/v2/models/m/parameters/a", "", DropParameters("m", 0, "a")),
        ("POST", MAIN + "/revert", "", RevertParameters("m", 0, "main")),
    ],
)
def test_what_is_asked(
    front: FrontProcess, client: Client, method: str, path: str, body: str, operation: Operation
) -> None:
    client.request(method, path, body.encode())
    call = front.answer_call(result=b'{"number":17}')
    assert call.operation == operation
    assert call.peer.kind == "tcp"
    answer = client.answer()
    assert (answer.status, answer.body) == (200, b"" if method == "DELETE" else b'{"number":17}')
    assert front.fds == []


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("text", [b"", b'{"number":17,"partial":true,"checksum":"crc32:00000000"}'])
def test_a_body_becomes_sealed_memory(front: FrontProcess, client: Client, text: bytes, chunked: bool) -> None:
    content = os.urandom(LIMIT)
    head = f"POST {MAIN} HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: {len(text)}\r\n"
    if chunked:
        client.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        whole = text + content
        for at in range(0, len(whole), 100_000):
            piece = whole[at : at + 100_000]
            client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.send(b"0\r\n\r\n")
    else:
        client.send(head.encode() + b"Content-Length: %d\r\n\r\n" % (len(text) + len(content)) + text + content)
    call = front.answer_call(result=b"{}")
    wanted = PushParameters("m", 0, "main", MemorySource(LIMIT))
    if text:
        wanted = PushParameters("m", 0, "main", MemorySource(LIMIT), 17, True, "crc32:00000000")
    assert call.operation == wanted
    (memory,) = front.fds
    front.fds.clear()
    assert os.pread(memory, LIMIT + 1, 0) == content
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(memory, fcntl.F_GET_SEALS) == seals
    os.close(memory)
    assert client.answer().status == 200
    assert descriptors_of(front) == []


def request(client: Client, content: bytes, **fields: str) -> None:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    client.send(f"POST {MAIN} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode() + content)


@pytest.mark.parametrize(
    ("fields", "content", "status", "words"),
    [
        ({"Content_Length": str(LIMIT + 3), "Inference_Header_Content_Length": "2"}, b"{}", 413, f"{LIMIT + 1} bytes"),
        ({"Content_Length": "4", "Inference_Header_Content_Length": "5"}, b"{}{}", 400, "its JSON should have 5"),
        ({"Content_Length": "4", "Inference_Header_Content_Length": "x"}, b"{}{}", 400, "an unsigned integer"),
        ({"Content_Length": "2", "Content_Encoding": "gzip"}, b"{}", 501, "Unsupported compression type"),
        ({"Content_Length": "2"}, b"{}", 400, "given: none"),
        ({"Content_Length": "2"}, b"[]", 400, "malformed push of parameters"),
        ({"Content_Length": "10"}, b'{"typo":1}', 400, "unknown field `typo`"),
        ({"Content_Length": "12"}, b'{"offset":1}', 400, "given: none"),
        ({"Content_Length": "13", "Inference_Header_Content_Length": "12"}, b'{"offset":1}x', 400, "of a 'region'"),
        (
            {"Content_Length": "13", "Inference_Header_Content_Length": "12"},
            b'{"file":"x"}x',
            400,
            "given: file, memory",
        ),
        ({"Content_Length": "13"}, b'{"number":-1}', 400, "malformed push"),
    ],
)
def test_what_is_refused(
    front: FrontProcess, client: Client, fields: dict[str, str], content: bytes, status: int, words: str
) -> None:
    request(client, content, **fields)
    answer = client.answer()
    assert (answer.status, words in answer.error) == (status, True), answer.error
    assert descriptors_of(front) == []


def test_what_the_supervisor_refuses(front: FrontProcess, client: Client) -> None:
    for code, status in (("REPLACED", 409), ("INVALID_ARGUMENT", 400), ("UNAVAILABLE", 503), ("NOT_FOUND", 404)):
        client.request("POST", MAIN, b'{"file":"p.npz"}')
        front.answer_call(code, "the sentence")
        answer = client.answer()
        assert (answer.status, answer.error) == (status, "the sentence")


def test_what_arrives_at_a_time_is_bounded_and_given_back_when_clients_go(front: FrontProcess, client: Client) -> None:
    half = LIMIT // 2 + 1
    with front.client() as slow:
        request(slow, b"x" * 1000, Content_Length=str(half), Inference_Header_Content_Length="0")
        deadline = time.monotonic() + 60
        while not descriptors_of(front):
            assert time.monotonic() < deadline
        request(client, b"", Content_Length=str(half), Inference_Header_Content_Length="0")
        answer = client.answer()
        words = f"{half} bytes of parameters are arriving, {half} more are beyond the {LIMIT} that are allowed"
        assert (answer.status, words in answer.error) == (503, True), answer.error
    while descriptors_of(front):
        assert time.monotonic() < deadline
    with front.client() as again:
        request(again, b"y" * half, Content_Length=str(half), Inference_Header_Content_Length="0")
        assert front.answer_call(result=b"{}").operation == PushParameters("m", 0, "main", MemorySource(half))
        assert again.answer().status == 200
    os.close(front.fds.pop())


def test_the_group_has_a_key_of_its_own() -> None:
    with (
        front_process(http={"port": 0, "restricted_api": ["parameters:x-key=secret"]}) as front,
        front.client() as client,
    ):
        for method, path in (("POST", MAIN), ("GET", MAIN), ("DELETE", MAIN), ("POST", MAIN + "/revert")):
            answer = client.ask(method, path)
            assert (answer.status, "x-key" in answer.error) == (403, True)
        assert json.loads(client.ask("GET", "/v2/health/live").body) == {"live": True}
