"""Listening sockets: bound, or passed by the service manager, and what an operator reads when they cannot be."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tensord.daemon.processes import listening
from tensord.daemon.processes.listening import ListenError


def test_listen_and_url() -> None:
    with contextlib.closing(listening.listen("127.0.0.1", 0, "grpc")) as listener:
        port = listener.socket.getsockname()[1]
        assert listener.url == f"grpc://127.0.0.1:{port}"
        assert not listener.socket.get_inheritable()
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(ListenError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            listening.listen("127.0.0.1", port, "http")
    assert listener.url is None


def test_an_address_as_urls_have_it() -> None:
    with contextlib.closing(listening.listen("[::1]", 0, "http")) as listener:
        port = listener.socket.getsockname()[1]
        assert listener.url == f"http://[::1]:{port}"


@pytest.mark.parametrize(("address", "paced"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True)])
def test_programs_of_this_host_are_never_paced(address: str, paced: bool) -> None:
    """Clients of other hosts get the pace that the operator chose."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as other:
        chosen = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    with contextlib.closing(listening.listen(address, 0, "http")) as listener:
        with socket.create_connection(listener.socket.getsockname()[:2]):
            listener.socket.setblocking(True)
            connection, _ = listener.socket.accept()
        with connection:
            control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert control.rstrip(b"\0") == (chosen.rstrip(b"\0") if paced else b"reno")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0"])
def test_what_is_written_leaves_at_once(address: str) -> None:
    """A connection has that from its listening socket."""
    with contextlib.closing(listening.listen(address, 0, "http")) as listener:
        with socket.create_connection(listener.socket.getsockname()[:2]):
            listener.socket.setblocking(True)
            connection, _ = listener.socket.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = listening.listen(f"unix:{path}", 0, "http", "0600")
    assert listener.url == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    with pytest.raises(ListenError, match="a process listens there already"):
        listening.listen(f"unix:{path}", 0, "grpc")
    listener.close()
    assert not path.exists()


def test_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    """Its process is gone, so nobody listens; the name of another's socket stays when ours is closed."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = listening.listen(f"unix:{path}", 0, "http")
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        listener.close()
        assert path.exists()


def test_a_file_is_never_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ListenError, match="there is a file of that name"):
        listening.listen(f"unix:{path}", 0, "http")
    assert path.read_text() == "mine"
    with pytest.raises(ListenError, match="cannot listen on unix:"):
        listening.listen(f"unix:{tmp_path}/no/s", 0, "http")


def test_names_and_addresses() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on no\.such\.host\.invalid:80"):
        listening.listen("no.such.host.invalid", 80, "http")
    for address in ("a..b", "a" * 64):
        with pytest.raises(ListenError, match=f"^cannot listen on {address}:80: it is no host name$"):
            listening.listen(address, 80, "http")
    assert listening.shown("::1", 80) == "[::1]:80"


def test_the_first_address_of_a_name_that_is_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """``localhost`` is 127.0.0.1 and ::1, and a host may have one of them only."""
    elsewhere, here = ((socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("192.0.2.1", "127.0.0.1"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere, here])
    listener = listening.listen("both", 0, "http")
    assert (listener.url or "").startswith("http://127.0.0.1:")
    taken = (*here[:4], listener.socket.getsockname())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [taken, here])
    # Who listens where the name leads first gets what clients send to it.
    with (
        pytest.raises(ListenError, match=r"^http\.port: cannot listen on both:7: Address already in use"),
        listening.named("http"),
    ):
        listening.listen("both", 7, "http")
    listener.close()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [elsewhere])
    with pytest.raises(ListenError, match=r"^grpc\.address: .* Cannot assign"), listening.named("grpc"):
        listening.listen("both", 7, "grpc")


def test_all_or_none(tmp_path: Path) -> None:
    """Several addresses of one protocol; where one of them cannot be, the others are given up again."""
    path = tmp_path / "s"
    made = listening.listen_all(["127.0.0.1", f"unix:{path}", "127.0.0.2"], 0, "http", "0660")
    assert [(listener.url or "").rpartition(":")[0] for listener in made] == [
        "http://127.0.0.1",
        "unix",
        "http://127.0.0.2",
    ]
    for listener in made:
        listener.close()
    with pytest.raises(ListenError, match=r"no\.such\.host"):
        listening.listen_all([f"unix:{path}", "no.such.host.invalid"], 0, "http", "0660")
    assert not path.exists()


ME = {"LISTEN_PID": str(os.getpid())}
#: A child that finds the sockets from descriptor 3 on, as systemd passes them, and says what it makes of them.
CHILD = """
import fcntl, os, sys
from tensord.daemon.processes import listening
from tensord.daemon.processes.listening import ListenError

count = len(sys.argv) - 1
# Numbers that are free: none of those that are given is overwritten before it was duplicated.
copies = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 300) for fd in sys.argv[1:]]
for at, fd in enumerate(copies):
    os.dup2(fd, 3 + at)
names = {"LISTEN_FDNAMES": os.environ["NAMES"]} if "NAMES" in os.environ else {}
try:
    found = listening.inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count), **names})
    for protocol, listeners in found.items():
        print(protocol, *(listener.url for listener in listeners))
        for listener in listeners:
            assert not listener.socket.get_inheritable() and not listener.socket.getblocking()
            listener.close()
except ListenError as error:
    print(error)
"""


def told(sockets: list[socket.socket], names: str | None) -> list[str]:
    fds = [sock.fileno() for sock in sockets]
    environment = os.environ | ({} if names is None else {"NAMES": names})
    command = [sys.executable, "-c", CHILD, *map(str, fds)]
    done = subprocess.run(command, pass_fds=fds, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def sockets(tmp_path: Path) -> list[socket.socket]:
    """Yields listening sockets: two of TCP, a unix socket with a path, and an abstract one."""
    made = [socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6)]
    for name in (str(tmp_path / "s"), f"\0tensord-test-{os.getpid()}"):
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].bind(name)
        made[-1].listen()
    yield made
    for sock in made:
        sock.close()


def test_none() -> None:
    assert listening.inherited({}) == {}
    assert listening.inherited({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == {}
    assert listening.inherited(ME) == {}
    assert listening.inherited(ME | {"LISTEN_FDS": "0"}) == {}


@pytest.mark.parametrize("names", [None, "tensord.socket", "unknown", "http"])
def test_one_is_of_http(sockets: list[socket.socket], names: str | None) -> None:
    assert told(sockets[:1], names) == [f"http http://127.0.0.1:{sockets[0].getsockname()[1]}"]


def test_several_by_name(sockets: list[socket.socket], tmp_path: Path) -> None:
    four, six = (sock.getsockname()[1] for sock in sockets[:2])
    assert told(sockets, "http:grpc:http:grpc") == [
        f"http http://127.0.0.1:{four} unix:{tmp_path / 's'}",
        f"grpc grpc://[::1]:{six} unix:@tensord-test-{os.getpid()}",
    ]
    # The name in the file system is the service manager's.
    assert (tmp_path / "s").exists()
    # Both of one unit that does not say.
    assert told([sockets[0], sockets[2]], "tensord.socket:tensord.socket") == [
        f"http http://127.0.0.1:{four} unix:{tmp_path / 's'}"
    ]


def test_what_is_of_no_use(sockets: list[socket.socket]) -> None:
    with socket.socket() as silent, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        silent.bind(("127.0.0.1", 0))
        datagrams.bind(("127.0.0.1", 0))
        for bad in (silent, datagrams):
            assert told([sockets[0], bad], "http:grpc") == [
                "socket activation: descriptor 4 is not a listening TCP or Unix stream socket"
            ]
    assert told(sockets[:2], "http:grcp") == [
        "socket activation: descriptor 4 is called 'grcp': FileDescriptorName= in its unit has to be http or grpc"
    ]
    assert told(sockets[:2], "http") == ["socket activation: 2 sockets were passed, but 1 names for them"]


@pytest.mark.parametrize("count", ["x", "-1", "1.5", ""])
def test_no_number(count: str) -> None:
    with pytest.raises(ListenError, match=f"LISTEN_FDS is '{count}', a number is expected"):
        listening.inherited(ME | {"LISTEN_FDS": count})
