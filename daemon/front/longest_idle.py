"""Closes the connection that has been idle longest if a protocol has too many, so that idle connections shut no client out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from operator import attrgetter
from typing import Any, Protocol

from tensord.daemon.submit.accounts import Account

_log = logging.getLogger(__name__)
#: Connections found in one search, so that not every new connection searches all others.
_FOUND_AT_ONCE = 32
#: Seconds until the next search if none was found, and until the next line in the log.
_SEARCH_SECONDS = 0.1
_LOG_SECONDS = 60.0


class IdleConnection(Protocol):
    """Interface of client connections that ``LongestIdle`` may close."""

    @property
    def used_at(self) -> float:
        """Returns when the connection last served its client, in seconds of a clock that never goes back."""

    @property
    def asks_nothing(self) -> bool:
        """Returns whether every request is answered and every response is sent."""

    def make_room(self) -> None:
        """Closes this idle connection, so that a new connection can be accepted."""


class LongestIdle:
    """Closes a front's longest idle connection to make room for a new client, and logs a warning at most once a minute.

    ``limit``: the most connections that are allowed, which only the warning tells.
    """

    def __init__(self, connections: Collection[IdleConnection], limit: int) -> None:
        self._connections = connections
        self._limit = limit
        #: Idle connections, each with when it was last of use, as it was found.
        self._found: deque[tuple[float, IdleConnection]] = deque()
        self._search_at = self._log_at = 0.0

    def make_room(self, now: float) -> bool:
        """Closes the connection that has been idle longest. Returns False if no connection is idle.

        ``now``: the present time in seconds, on the clock of ``IdleConnection.used_at``.
        """
        for _ in range(2):
            while self._found:
                used_at, guest = self._found.popleft()
                if guest.used_at == used_at and guest.asks_nothing:
                    self._tell(now)
                    guest.make_room()
                    return True
            if now < self._search_at:
                break
            self._search(now)
        return False

    def _search(self, now: float) -> None:
        for guest in sorted(self._connections, key=attrgetter("used_at")):
            if guest.asks_nothing:
                self._found.append((guest.used_at, guest))
                if len(self._found) == _FOUND_AT_ONCE:
                    return
        if not self._found:
            self._search_at = now + _SEARCH_SECONDS

    def _tell(self, now: float) -> None:
        if now >= self._log_at:
            self._log_at = now + _LOG_SECONDS
            _log.warning("%d connections are allowed (max_connections): those idle longest make room", self._limit)


def described(connection: IdleConnection, account: Account | None, now: float) -> dict[str, Any]:
    """Returns a connection's state for operators, with the keys owner, idle_s, request_bytes and answer_bytes.

    owner is the client's user or TCP host, such as "uid 1000" or "tcp 10.0.0.5". idle_s is the seconds from the connection's
    last use to ``now``, or None while the connection is in use. request_bytes and answer_bytes say how many bytes of request and
    response arenas the connection holds. If ``account`` is None, owner is "", request_bytes is 0 and answer_bytes is 0.
    """
    return {
        "owner": "" if account is None else account.client.owner,
        "idle_s": round(max(0.0, now - connection.used_at), 1) if connection.asks_nothing else None,
        "request_bytes": 0 if account is None else account.requests,
        "answer_bytes": 0 if account is None else account.answers,
    }
