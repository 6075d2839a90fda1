"""Tests where a model comes from: what a URL may be, and an HTTP server of each kind there is."""

from __future__ import annotations

import gc
import gzip
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import fsspec.asyn
import pytest
from fsspec.implementations.http import HTTPFileSystem

from tensord.daemon import fetch as sources
from tensord.daemon.fetch import Source
from tensord.shm.errors import InvalidArgument, NotFound, Unavailable

CONTENT = bytes(range(256)) * 40
Answers = Callable[[BaseHTTPRequestHandler], None]


# fsspec has a thread with an event loop, which stays for the life of the process: before anybody counts descriptors.
fsspec.asyn.get_loop()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answers], str]]:
    """Starts a server that answers GET and HEAD as it is told; gives its URL. Pauses are short."""
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


def answer(
    request: BaseHTTPRequestHandler,
    ranges: bool = True,
    length: bool = True,
    etag: str = '"7"',
    content: bytes = CONTENT,
    coding: str = "",
) -> None:
    """Answers with ``content``, or the part that is asked for."""
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", "")) if ranges else None
    begin, end = (int(found[1]), int(found[2]) + 1) if found else (0, len(content))
    request.send_response(206 if found else 200)
    if length:
        request.send_header("Content-Length", str(len(content[begin:end])))
    if found:
        request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
    if etag:
        request.send_header("ETag", etag)
    if coding:
        request.send_header("Content-Encoding", coding)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(content[begin:end])


def fetched(source: Source, folder: Path, limit: int = 1 << 20) -> bytes:
    """Downloads the only file; returns its bytes."""
    source.download(source.files(), [folder / "file"], folder, limit)
    return (folder / "file").read_bytes()


def test_a_whole_file(served: Callable[[Answers], str], tmp_path: Path) -> None:
    source = Source(served(answer))
    (file,) = source.files()
    assert (file.byte_size, file.identity) == (len(CONTENT), 'ETag="7"')
    assert fetched(source, tmp_path) == CONTENT


def test_an_archive_is_never_of_two_versions(served: Callable[[Answers], str], tmp_path: Path) -> None:
    """A server with parts, which says neither an ETag nor when the file changed, has another file for each question."""
    versions = itertools.cycle([b"a" * 5000, b"b" * 5000])

    def changing(request: BaseHTTPRequestHandler) -> None:
        answer(request, etag="", content=next(versions))

    assert len({*fetched(Source(served(changing)), tmp_path)}) == 1


def test_a_server_that_says_no_size(served: Callable[[Answers], str], tmp_path: Path) -> None:
    source = Source(served(lambda request: answer(request, ranges=False, length=False, etag="")))
    (file,) = source.files()
    assert (file.byte_size, file.identity) == (-1, "")
    assert fetched(source, tmp_path) == CONTENT
    with pytest.raises(InvalidArgument, match=r"it has more than 1000 bytes \(--max-byte-size\)"):
        fetched(source, tmp_path, 1000)


@pytest.mark.parametrize("length", [False, True])
def test_what_has_come_so_far_is_said(
    served: Callable[[Answers], str],
    tmp_path: Path,
    length: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The progress of a download has the file's whole size only if the server says how large the file is."""
    ticks = itertools.count(0, 60)
    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=ticks.__next__))
    source = Source(served(lambda request: answer(request, ranges=False, length=length, content=bytes(3 << 20))))
    source.download(source.files(), [tmp_path / "file"], tmp_path, 1 << 30)
    assert capsys.readouterr().err.splitlines()[-1] == f"m.tar: 3{' of 3' if length else ''} MiB"


def test_tries_again(served: Callable[[Answers], str], tmp_path: Path) -> None:
    """Two answers of 503 and one that breaks off are no end of it."""
    failing = iter(["503", "503"])

    def sometimes(request: BaseHTTPRequestHandler) -> None:
        if request.command == "GET" and next(failing, None):
            request.send_error(503)
        else:
            answer(request)

    assert fetched(Source(served(sometimes)), tmp_path) == CONTENT


def test_gives_up(served: Callable[[Answers], str], tmp_path: Path) -> None:
    def ill(request: BaseHTTPRequestHandler) -> None:
        if request.command == "GET":
            request.send_error(503)
        else:
            answer(request)

    with pytest.raises(Unavailable, match="503 Service Unavailable"):
        fetched(Source(served(ill)), tmp_path)


def test_a_short_answer_is_none(served: Callable[[Answers], str], tmp_path: Path) -> None:
    """A file that is replaced by a shorter one meanwhile does not come as a whole."""

    def short(request: BaseHTTPRequestHandler) -> None:
        answer(request, content=CONTENT if request.command == "HEAD" else CONTENT[:10])

    with pytest.raises(Unavailable, match=rf"'m\.tar' has {len(CONTENT)} bytes, 10 came"):
        fetched(Source(served(short)), tmp_path)


@pytest.mark.parametrize("redirected", [False, True])
def test_a_signed_url_is_asked_for_as_it_is_written(
    served: Callable[[Answers], str], tmp_path: Path, redirected: bool
) -> None:
    """What is signed is the text: %2F is no /, and %7E no ~."""
    asked: list[str] = []

    def signed(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/m.tar":
            request.send_response(302)
            request.send_header("Location", "/models%2Fa%7Eb.tar?X-Signature=a%2Fb%7Ec%2B")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        asked.append(request.path)
        answer(request)

    url = served(signed)
    if not redirected:
        url = url.replace("/m.tar", "/models%2Fa%7Eb.tar?X-Signature=a%2Fb%7Ec%2B")
    assert fetched(Source(url), tmp_path) == CONTENT
    assert {*asked} == {"/models%2Fa%7Eb.tar?X-Signature=a%2Fb%7Ec%2B"}


def test_a_coded_archive_comes_as_it_is_sent(served: Callable[[Answers], str], tmp_path: Path) -> None:
    """Of a .tar.gz some servers say that it is a .tar with Content-Encoding gzip; its checksum is that of the file."""

    def coded(request: BaseHTTPRequestHandler) -> None:
        assert request.headers["Accept-Encoding"] == "identity"
        answer(request, content=gzip.compress(CONTENT, mtime=0), coding="gzip")

    url = served(coded)
    assert fetched(Source(f"{url}.gz"), tmp_path) == gzip.compress(CONTENT, mtime=0)
    # One that is published without is the .tar again before its checksum is looked at.
    assert fetched(Source(url), tmp_path) == CONTENT
    with pytest.raises(InvalidArgument, match=r"it has more than 5000 bytes \(--max-byte-size\)"):
        fetched(Source(url), tmp_path, 5000)


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


def test_secrets_are_not_shown(served: Callable[[Answers], str], tmp_path: Path) -> None:
    """Neither in messages nor in what is kept of a file. Another signature is no other file."""
    source = Source("https://user:password@127.0.0.1:1/m.tar.gz?signature=secret")
    assert source.shown == "https://127.0.0.1:1/m.tar.gz"
    assert source.is_archive
    url = served(answer)
    assert "secret" not in repr(Source(f"{url}?signature=secret").files())
    assert Source(f"{url}?signature=secret").files() == Source(f"{url}?signature=other").files()
    assert fetched(Source(f"{url}?signature=secret"), tmp_path) == CONTENT
