"""A listening socket that takes connections without asking anew, for each of them, what is the same for all.

``socket.accept`` makes a ``socket.socket``, and whoever is handed one looks up family and kind five times in tables of constants,
which costs as much as the kernel's part of taking a connection. What it is made of, ``socket.SocketType``, knows them as numbers.
"""

from __future__ import annotations

import socket


class ListeningSocket:
    """Owns a socket that listens, whose ``accept`` does not block."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._family, self._kind, self._proto = int(listener.family), int(listener.type), listener.proto
        listener.setblocking(False)

    def accept(self) -> tuple[socket.SocketType, object]:
        """A connection, blocking or not, and the address of its client. Raises OSError as ``socket.accept``."""
        fd, address = self._listener._accept()  # type: ignore[attr-defined]
        return socket.SocketType(self._family, self._kind, self._proto, fd), address

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()

    def __repr__(self) -> str:
        return f"<ListeningSocket {self._listener!r}>"
