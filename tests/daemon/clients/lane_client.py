"""Provides a raw client of the clients' socket, as any language could write it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


class LaneClient:
    """A connection, and the lanes that were opened on it. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.connect(str(path))
        #: Number of a lane -> its socket.
        self.lanes: dict[int, socket.socket] = {}

    def __enter__(self) -> LaneClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.disconnect()
        self.close_lanes()

    def send(self, **question: Any) -> None:
        self._sock.send(json.dumps(question).encode())

    def receive(self) -> Any:
        content, fds, _, _ = socket.recv_fds(self._sock, 128 << 10, 253)
        answer = json.loads(content)
        new = (
            [entry["lane"] for entry in answer.get("lanes", ()) if type(entry) is dict and entry["new"]] if fds else []
        )
        assert len(new) == len(fds), answer
        self.lanes |= {number: socket.socket(fileno=fd) for number, fd in zip(new, fds, strict=True)}
        return answer

    def ask(self, **question: Any) -> Any:
        self.send(**question)
        return self.receive()

    def open(self, model: str, **fields: Any) -> Any:
        """Asks for a lane to a model; returns the daemon's answer."""
        return self.ask(open={"model": model, **fields})

    def say(self, number: int, content: bytes) -> bytes:
        """Sends bytes on a lane; returns what comes back, nothing where the lane has ended."""
        try:
            self.lanes[number].send(content)
            return self.lanes[number].recv(1 << 16)
        except OSError:
            return b""

    def disconnect(self) -> None:
        """Closes the connection, and keeps the lanes' descriptors."""
        self._sock.close()

    def close_lanes(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        self.lanes.clear()
