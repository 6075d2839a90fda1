"""sd_notify over real datagram sockets, path and abstract."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tensord.daemon.processes.notify import Notifier


@pytest.mark.parametrize("abstract", [True, False])
def test_messages(abstract: bool, tmp_path: Path) -> None:
    address = f"\0tensord-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        notifier = Notifier({"NOTIFY_SOCKET": "@" + address[1:] if abstract else address})
        notifier.ready("two\nlines")
        notifier.alive()
        notifier.extend_timeout(1.5)
        notifier.stopping("bye")
        notifier.reloading()
        received = [manager.recv(1024).decode() for _ in range(5)]
        notifier.close()
        notifier.close()
        notifier.ready("after the end")
    assert received[:4] == [
        "READY=1\nSTATUS=two lines",
        "WATCHDOG=1",
        "EXTEND_TIMEOUT_USEC=1500000",
        "STOPPING=1\nSTATUS=bye",
    ]
    assert received[4].startswith("RELOADING=1\nMONOTONIC_USEC=")


def test_nobody_listens(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "nothing")}, {"NOTIFY_SOCKET": "vsock:2:1"}):
        notifier = Notifier(environment)
        notifier.ready("x")
        notifier.close()


def test_a_manager_that_does_not_read_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        for _ in range(10_000):
            notifier.alive()
        notifier.close()


@pytest.mark.parametrize(
    ("environment", "interval"),
    [
        ({"WATCHDOG_USEC": "20000000"}, 10.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())}, 10.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "x"}, 0.0),
        ({}, 0.0),
    ],
)
def test_watchdog_interval(environment: dict[str, str], interval: float) -> None:
    assert Notifier(environment).watchdog_interval == interval
