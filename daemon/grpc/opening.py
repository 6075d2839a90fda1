"""Connections that were taken become the loop's, which can speak TLS. Whose handshake fails is not heard of any more."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class Opening:
    """One per front. ``make`` gives a connection its protocol; it is told whose that is, as ``Peer.owner`` tells it.

    ``context`` None: plain text.
    """

    def __init__(self, make: Callable[[str], asyncio.BaseProtocol], context: ssl.SSLContext | None) -> None:
        self._make = make
        self._context = context
        self._loop = asyncio.get_running_loop()
        #: Those that are under way.
        self.pending: set[Coroutine[Any, Any, object]] = set()

    def open(self, taken: socket.SocketType, owner: str) -> None:
        """Begins one."""
        make, connection = functools.partial(self._make, owner), socket.socket(fileno=taken.detach())
        opening = self._loop.connect_accepted_socket(make, connection, ssl=self._context)
        self.pending.add(opening)
        self._go_on(opening, connection)

    def _go_on(self, opening: Coroutine[Any, Any, object], connection: socket.socket, _: object = None) -> None:
        """A step of it, to the next future that it waits for: a task would be a twentieth of what a connection costs."""
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
