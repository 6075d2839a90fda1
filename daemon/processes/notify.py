"""Notifies the service manager (sd_notify(3)) of readiness, status and liveness. Does nothing if there is no service manager.

Each message is one datagram, which is dropped if the service manager does not read.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Owns the socket to the service manager. If there is no service manager, the methods do nothing."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket: socket.socket | None = None
        #: Seconds between messages that feed the watchdog (half of its limit); 0.0: there is none.
        self.watchdog_interval = _watchdog_interval(environment)
        address = environment.get("NOTIFY_SOCKET", "")
        if address.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            # An abstract address is written with @ in place of its leading zero byte.
            self._address = "\0" + address[1:] if address[0] == "@" else address

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={_line(status)}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={_line(status)}")

    def reloading(self) -> None:
        """Tells the service manager that a reload begins (Type=notify-reload). Call ``ready`` when the reload has ended."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def alive(self) -> None:
        """Tells the watchdog of the service manager that the daemon is alive."""
        self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> None:
        """Asks the service manager for ``seconds`` more to start, reload or stop."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def close(self) -> None:
        """Closes the socket to the service manager. May be called again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto(message.encode(), self._address)
        except OSError:
            pass  # the manager is gone or its buffer is full: the service goes on, and the next message may arrive


def _watchdog_interval(environment: Mapping[str, str]) -> float:
    microseconds = environment.get("WATCHDOG_USEC", "")
    meant = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 2e6 if microseconds.isdecimal() and meant else 0.0


def _line(text: str) -> str:
    return text.replace("\n", " ")
