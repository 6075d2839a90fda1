"""Tests where a model comes from: what a URL may be, and an HTTP server of each kind there is."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec.asyn
import pytest
from fsspec.implementations.http import HTTPFileSystem

from tensord.daemon.fetching import source as sources
from tensord.daemon.fetching.source import Source, is_inside
from tensord.shm.errors import InvalidArgument, NotFound, Unavailable

CONTENT = bytes(range(256)) * 40
Answers = Callable[[BaseHTTPRequestHandler], None]


# fsspec has a thread with an event loop, which stays for the life of the process: before anybody counts descriptors.
fsspec.asyn.get_loop()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answers], str]]:
    """Starts a server that answers GET and HEAD as it is told; gives its URL. Blocks are of 1000 bytes, pauses short."""
    monkeypatch.setattr(sources, "BLOCK_BYTE_SIZE", 1000)
    monkeypatch.setattr(sources, "PAUSES", (0.01, 0.01))
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answers) -> str:
        class Handler(BaseHTTPRequestHandler):
            do_GET = do_HEAD = answer

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/m.tar"

    yield start
    # Each file system keeps its connections as long as fsspec keeps it.
    HTTPFileSystem.clear_instance_cache()
    gc.collect()
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(request: BaseHTTPRequestHandler, ranges: bool = True, length: bool = True, etag: str = '"7"') -> None:
    """Answers with ``CONTENT``, or the part that is asked for."""
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", "")) if ranges else None
    begin, end = (int(found[1]), int(found[2]) + 1) if found else (0, len(CONTENT))
    request.send_response(206 if found else 200)
    if length:
        request.send_header("Content-Length", str(len(CONTENT[begin:end])))
    if found:
        request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(CONTENT)}")
    if etag:
        request.send_header("ETag", etag)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(CONTENT[begin:end])


def joined(source: Source, begin: int = 0) -> tuple[bytes, list[int]]:
    """Fetches the only file from an offset on; returns its bytes, and the offsets of the blocks that came."""
    (file,) = source.files()
    content, begins = bytearray(CONTENT[:begin]), []
    for _, at, block in source.blocks([(file, begin)]):
        del content[at:]
        content += block
        begins.append(at)
    return bytes(content), begins


def test_parts(served: Callable[[Answers], str]) -> None:
    source = Source(served(answer))
    (file,) = source.files()
    assert (file.byte_size, file.identity) == (len(CONTENT), 'ETag="7"')
    content, begins = joined(source, 5000)
    assert content == CONTENT
    assert begins == [5000, 6000, 7000, 8000, 9000, 10000]


def test_a_server_without_parts_sends_the_whole_once(served: Callable[[Answers], str]) -> None:
    content, begins = joined(Source(served(lambda request: answer(request, ranges=False))), 5000)
    assert content == CONTENT
    assert begins[0] == 0


def test_a_server_that_says_no_size(served: Callable[[Answers], str]) -> None:
    source = Source(served(lambda request: answer(request, ranges=False, length=False, etag="")))
    (file,) = source.files()
    assert (file.byte_size, file.identity) == (-1, "")
    assert joined(source)[0] == CONTENT


def test_tries_again(served: Callable[[Answers], str]) -> None:
    """Two answers of 503 and one that breaks off are no end of it."""
    failing = iter(["503", "503"])

    def sometimes(request: BaseHTTPRequestHandler) -> None:
        if request.command == "GET" and next(failing, None):
            request.send_error(503)
        else:
            answer(request)

    assert joined(Source(served(sometimes)))[0] == CONTENT


def test_gives_up(served: Callable[[Answers], str]) -> None:
    def ill(request: BaseHTTPRequestHandler) -> None:
        if request.command == "GET":
            request.send_error(503)
        else:
            answer(request)

    with pytest.raises(Unavailable, match="503 Service Unavailable"):
        joined(Source(served(ill)))


def test_a_short_answer_is_none(served: Callable[[Answers], str]) -> None:
    """A file that is replaced by a shorter one meanwhile does not come as a whole."""

    def short(request: BaseHTTPRequestHandler) -> None:
        if request.command == "HEAD":
            answer(request)
            return
        request.send_response(206)
        request.send_header("Content-Range", f"bytes 0-9/{len(CONTENT)}")
        request.send_header("Content-Length", "10")
        request.end_headers()
        request.wfile.write(CONTENT[:10])

    with pytest.raises(Unavailable, match=r"'m\.tar': 1000 bytes from 0 on were asked for, 10 came"):
        joined(Source(served(short)))


def test_nothing_there(served: Callable[[Answers], str]) -> None:
    with pytest.raises(NotFound, match="it is not there"):
        Source(served(lambda request: request.send_error(404))).files()


def test_who_is_refused_does_not_ask_again(served: Callable[[Answers], str]) -> None:
    asked = []

    def refuse(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.command)
        request.send_error(403)

    with pytest.raises(InvalidArgument, match="403 Forbidden"):
        Source(served(refuse)).files()
    # By HEAD and then by GET, as fsspec does where HEAD is refused.
    assert len(asked) <= 2


def test_no_server(served: Callable[[Answers], str]) -> None:
    with pytest.raises(Unavailable, match="Cannot connect"):
        Source("http://127.0.0.1:1/m.tar").files()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nothing://host/m", "Protocol not known: nothing"),
        ("https://host/models/m", "https://host/models/m: nobody lists a folder over HTTP; it has to be an archive"),
        ("zip://m::https://host/m.zip", "is a chain of URLs"),
    ],
)
def test_no_url(url: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        Source(url)
    assert words in error.value.message


def test_secrets_are_not_shown(served: Callable[[Answers], str]) -> None:
    """Neither in messages nor in what is kept of a file. Another signature is no other file."""
    source = Source("https://user:password@127.0.0.1:1/m.tar.gz?signature=secret")
    assert source.shown == "https://127.0.0.1:1/m.tar.gz"
    assert source.is_archive
    url = served(answer)
    assert "secret" not in repr(Source(f"{url}?signature=secret").files())
    assert Source(f"{url}?signature=secret").files() == Source(f"{url}?signature=other").files()
    assert joined(Source(f"{url}?signature=secret"))[0] == CONTENT


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a//b", "/a", "a/../b", "a\\b", "a\0"])
def test_no_path(name: str) -> None:
    assert not is_inside(name)
    assert is_inside("1/model.py")
