"""Listening sockets: bound, and what an operator reads when they cannot be."""

from __future__ import annotations

import contextlib
import socket
import stat
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
