"""Turns accepted sockets into connections of the event loop, with or without TLS."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from tensord.daemon.control.certificates import Certificates

_log = logging.getLogger(__name__)


class Opening:
    """Turns the accepted sockets of one front into connections of the event loop, with TLS if that is configured."""

    def __init__(
        self,
        make: Callable[[str], asyncio.BaseProtocol],
        certificates: Certificates,
        handshake_timeout: float | None = None,
        shutdown_timeout: float | None = None,
    ) -> None:
        """Stores how connections are opened.

        Args:
          make: called with the name of a client (``Peer.owner``), and returns a protocol for the connection.
          certificates: connections are encrypted if these have a TLS context.
          handshake_timeout: how many seconds a TLS handshake may take. None means asyncio's default.
          shutdown_timeout: how many seconds the end of a TLS connection may take. None means asyncio's default.
        """
        self._make = make
        self._certificates = certificates
        self._timeouts = {"ssl_handshake_timeout": handshake_timeout, "ssl_shutdown_timeout": shutdown_timeout}
        self._loop = asyncio.get_running_loop()
        #: The openings that are under way.
        self.pending: set[Coroutine[Any, Any, object]] = set()

    def open(self, taken: socket.SocketType, owner: str) -> None:
        """Begins to serve a client over the accepted socket ``taken``, and returns at once. ``owner``: the client's name."""
        make, connection = functools.partial(self._make, owner), socket.socket(fileno=taken.detach())
        context = self._certificates.context
        timeouts = {} if context is None else self._timeouts
        opening = self._loop.connect_accepted_socket(make, connection, ssl=context, **timeouts)
        self.pending.add(opening)
        self._go_on(opening, connection)

    def _go_on(self, opening: Coroutine[Any, Any, object], connection: socket.socket, _: object = None) -> None:
        # Runs the coroutine until it waits for a future, which calls this again: a task would cost more.
        try:
            future: asyncio.Future[object] = opening.send(None)
            future.add_done_callback(functools.partial(self._go_on, opening, connection))
            return
        except StopIteration:
            self.pending.discard(opening)
            return
        except (OSError, ssl.SSLError):
            pass  # a client that breaks off its handshake is its own affair
        except Exception:
            _log.exception("a connection could not be opened")
        self.pending.discard(opening)
        connection.close()

    def __repr__(self) -> str:
        return f"<Opening, {len(self.pending)} under way>"
