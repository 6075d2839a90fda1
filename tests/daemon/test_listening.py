"""The listening socket: bound, inherited, and what an operator reads when it cannot be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from daemon import listening
from daemon.listening import ListenError


def test_listen_and_url() -> None:
    with listening.listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert listening.url(sock) == f"http://127.0.0.1:{port}"
        assert not sock.get_inheritable()
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(ListenError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            listening.listen("127.0.0.1", port)


def test_names_and_addresses() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on no\.such\.host\.invalid:80"):
        listening.listen("no.such.host.invalid", 80)
    assert listening.shown("::1", 80) == "[::1]:80"


def test_no_socket_activation() -> None:
    assert listening.inherited({}) is None
    assert listening.inherited({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) is None
    me = str(os.getpid())
    assert listening.inherited({"LISTEN_PID": me, "LISTEN_FDS": "0"}) is None
    with pytest.raises(ListenError, match="2 sockets were passed"):
        listening.inherited({"LISTEN_PID": me, "LISTEN_FDS": "2"})


@pytest.mark.parametrize("listens", [True, False])
def test_socket_activation(listens: bool) -> None:
    """A child that finds the socket at descriptor 3, as systemd passes it."""
    program = (
        "import os, sys\nfrom daemon import listening\nos.dup2(int(sys.argv[1]), 3)\n"
        "try:\n    sock = listening.inherited({'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'})\n"
        "    print(listening.url(sock), os.get_inheritable(3)); sock.close()\n"
        "except listening.ListenError as error:\n    print(error)\n"
    )
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if listens:
            sock.listen()
        fd = sock.fileno()
        out = subprocess.run(
            [sys.executable, "-c", program, str(fd)], pass_fds=[fd], capture_output=True, text=True, check=False
        )
        expected = (
            f"{listening.url(sock)} False"
            if listens
            else "socket activation: descriptor 3 is not a listening TCP socket"
        )
    assert out.stdout.strip() == expected, out.stderr
