"""Sockets of the service manager: which are taken for what, and what an operator reads of those that cannot be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tensord.daemon.processes import socket_activation
from tensord.daemon.processes.listening import ListenError

ME = {"LISTEN_PID": str(os.getpid())}
#: A child that finds the sockets from descriptor 3 on, as systemd passes them, and says what it makes of them.
CHILD = """
import fcntl, os, sys
from tensord.daemon.processes import socket_activation
from tensord.daemon.processes.listening import ListenError

count = len(sys.argv) - 1
# Numbers that are free: none of those that are given is overwritten before it was duplicated.
copies = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 300) for fd in sys.argv[1:]]
for at, fd in enumerate(copies):
    os.dup2(fd, 3 + at)
names = {"LISTEN_FDNAMES": os.environ["NAMES"]} if "NAMES" in os.environ else {}
try:
    found = socket_activation.inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count), **names})
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
    assert socket_activation.inherited({}) == {}
    assert socket_activation.inherited({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == {}
    assert socket_activation.inherited(ME) == {}
    assert socket_activation.inherited(ME | {"LISTEN_FDS": "0"}) == {}


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
        socket_activation.inherited(ME | {"LISTEN_FDS": count})
