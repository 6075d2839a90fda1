"""Tests what the operator asks of requests: keys for restricted calls, headers as parameters. Through a real front."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensord.shm.operations import RepositoryIndex
from tests.fakes import Client, FrontProcess, binary_request, front_process, json_request, post

REFUSED = (403, "This API is restricted, expecting header 'the-key'")


def with_header(request: bytes, header: bytes) -> bytes:
    line, _, rest = request.partition(b"\r\n")
    return line + b"\r\n" + header + b"\r\n" + rest


@pytest.fixture(scope="module")
def restricted() -> Iterator[FrontProcess]:
    with front_process(http={"restricted_api": ["inference,model-repository:the-key=sesame"]}) as front:
        front.model(front.worker())
        yield front


@pytest.fixture(scope="module")
def forwarding() -> Iterator[FrontProcess]:
    with front_process(http={"header_forward_pattern": "(x-fwd-.*|timeout)"}) as front:
        front.model(front.worker())
        yield front


def test_infer_needs_its_key_every_time(restricted: FrontProcess) -> None:
    """The key is also asked for after a request with the same head but for the key was answered on this connection."""
    worker = restricted.workers[0]
    with restricted.client() as client:
        for header, status in ((b"The-Key: sesame", 200), (b"The-Key: sesamE", 403), (b"the-key: sesame", 200)) * 3:
            client.send(with_header(binary_request(b"abc"), header))
            if status == 200:
                worker.echo(worker.next())
            answer = client.answer()
            assert answer.status == status
            if status == 403:
                assert (answer.status, answer.error) == REFUSED
    assert worker.idle(0.05)


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_refused_body_is_not_looked_at(restricted: FrontProcess, size: int) -> None:
    """The refusal does not tell whether the model exists, and the connection goes on."""
    with restricted.client() as client:
        for model in (b"echo", b"nope"):
            client.send(post(b"x" * size).replace(b"/echo/", b"/%b/" % model))
            answer = client.answer()
            assert (answer.status, answer.error) == REFUSED


def test_other_calls(restricted: FrontProcess) -> None:
    index = b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\n%bContent-Length: 0\r\n\r\n"
    with restricted.client() as client:
        client.send(index % b"")
        answer = client.answer()
        assert (answer.status, answer.error) == REFUSED
        client.send(index % b"THE-KEY: sesame\r\n")
        assert restricted.answer_call(result=b"[]").operation == RepositoryIndex()
        assert client.answer().status == 200
        client.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.answer().status == 200


def parameters(front: FrontProcess, client: Client, request: bytes) -> dict[str, object]:
    client.send(request)
    submitted = front.workers[0].next()
    front.workers[0].echo(submitted)
    assert client.answer().status == 200
    return dict(submitted.parameters)


def test_headers_are_parameters_of_their_request_alone(forwarding: FrontProcess) -> None:
    """Heads and bodies that were seen before, with another header: nothing of the one before is left."""
    with forwarding.client() as client:
        for _ in range(3):
            request = binary_request(b"abc")
            assert parameters(forwarding, client, request) == {}
            assert parameters(forwarding, client, with_header(request, b"X-Fwd-A: 1")) == {"X-Fwd-A": "1"}
            assert parameters(forwarding, client, with_header(request, b"X-Fwd-A: \t2  2 \t")) == {"X-Fwd-A": "2  2"}
            assert parameters(forwarding, client, with_header(request, b"x-other: 2")) == {}


def test_a_header_beats_the_body(forwarding: FrontProcess) -> None:
    body = b'{"parameters":{"x-fwd-a":"p","b":1},"inputs":[{"name":"x","datatype":"UINT8","shape":[3],"data":[1,2,3]}]}'
    with forwarding.client() as client:
        assert parameters(forwarding, client, post(body)) == {"x-fwd-a": "p", "b": 1}
        assert parameters(forwarding, client, with_header(post(body), b"x-fwd-a: h")) == {"x-fwd-a": "h", "b": 1}


def test_a_reserved_name(forwarding: FrontProcess) -> None:
    with forwarding.client() as client:
        client.send(with_header(json_request(b"abc"), b"timeout: 5"))
        answer = client.answer()
        assert (answer.status, answer.error) == (
            400,
            "Header 'timeout' is reserved for Triton usage and cannot be forwarded.",
        )
        assert parameters(forwarding, client, json_request(b"abc")) == {}


@pytest.mark.parametrize("endpoint", [b"generate", b"generate_stream"])
def test_generate_takes_headers_too(forwarding: FrontProcess, endpoint: bytes) -> None:
    body = b'{"x":[1,2,3],"x-fwd-a":"p","b":1}'
    request = post(body).replace(b"/infer ", b"/%b " % endpoint)
    both = with_header(with_header(request, b"x-fwd-a: h"), b"X-Fwd-B: 2")
    for asked, expected in ((request, {"x-fwd-a": "p", "b": 1}), (both, {"x-fwd-a": "h", "X-Fwd-B": "2", "b": 1})):
        # Events have no length: each on a connection of its own.
        with forwarding.client() as client:
            assert parameters(forwarding, client, asked) == expected
    with forwarding.client() as client:
        client.send(with_header(request, b"timeout: 5"))
        answer = client.answer()
        assert (answer.status, answer.error) == (
            400,
            "Header 'timeout' is reserved for Triton usage and cannot be forwarded.",
        )


@pytest.mark.parametrize("size", [100, 1 << 20], ids=["small", "large"])
def test_a_page_may_read_why_a_request_whose_head_was_seen_before_is_refused(size: int) -> None:
    """On a new connection, and on one where the last new head was that of another page."""
    asked = {page: binary_request(bytes(size), f"Origin: {page}") for page in ("http://a", "http://b")}
    with front_process(http={"cors_origins": list(asked), "body_timeout": 1.0}) as front:
        worker = front.worker()
        front.model(worker)
        with front.client() as client, front.client() as other:
            for page in [*asked] * 2:
                client.send(asked[page])
                worker.echo(worker.next())
                assert client.answer().headers["access-control-allow-origin"] == page
            for late in (client, other):
                late.send(asked["http://a"][:-1])
            for late in (client, other):
                answer = late.answer()
                assert (answer.status, answer.headers["access-control-allow-origin"]) == (408, "http://a")
