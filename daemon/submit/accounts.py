"""Counts the bytes of arenas that each connection and each client of a front holds, and limits them.

    for requests    bytes of the front's arena, from the first byte of a request until the request is answered
    for answers     bytes of the workers' arenas, until the client has read the answer

A client is a user on a Unix socket, or a host on TCP. The limit for requests does not apply to a connection or client that
holds no bytes for requests. For requests, a client's limit depends on the size of the lease (``ClientAccount.limit_of``).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable

from tensord.config.options import Arenas

#: Kinds of requests that are remembered of one client.
_MAX_BULKY = 1024
#: Clients of whom those that are gone are remembered.
_MANY = 256


#: Up to which a lease is small, and medium; all that there is.
Sizes = tuple[int, int, int]


class Holdings:
    """Stores how many arena bytes one connection or client holds for requests, and how many for answers.

    ``limit``: a limit in bytes, which applies to requests and to answers separately.
    """

    __slots__ = ("answers", "limit", "requests")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.requests = 0
        self.answers = 0


class ClientAccount(Holdings):
    """Counts the arena bytes that one client holds, over all connections of the client.

    ``sizes``: the bytes of the largest small lease, of the largest medium lease and of the whole arena. ``limit_of`` uses them.
    """

    __slots__ = ("accounts", "bulky", "last", "owner", "sent", "sizes")

    def __init__(self, owner: str, limit: int, sizes: Sizes) -> None:
        super().__init__(limit)
        self.owner = owner
        self.sizes = sizes
        #: Connections that are open, or have something to give back.
        self.accounts = 0
        #: The kinds of requests whose answers were large when it held much.
        self.bulky: set[Hashable] = set()
        #: Bytes of the last answer with which it held its share.
        self.last = 0
        #: Requests of those kinds that waited and were let go, until they are answered.
        self.sent: set[int] = set()

    def limit_of(self, byte_size: int) -> int:
        """Returns how many bytes of the request arena the client may hold if it asks for a lease of ``byte_size`` bytes.

        The limit is the whole arena for a small lease, ``self.limit`` for a large lease, and the mean of both for a medium
        lease. ``self.sizes`` tells how large a small and a medium lease may be.
        """
        small, medium, whole = self.sizes
        if byte_size <= small:
            return whole
        return (self.limit + whole) // 2 if byte_size <= medium else self.limit


class Account(Holdings):
    """Counts the arena bytes that one connection holds, and decides whether it may have more now."""

    __slots__ = ("client", "last")

    def __init__(self, client: ClientAccount, limit: int) -> None:
        super().__init__(limit)
        self.client = client
        #: Bytes of the last answer that it held.
        self.last = 0

    # ------------------------------------------------------------------------------------------------ request arena

    def owed(self, byte_size: int) -> int:
        """Returns how many bytes the client has to give back before the connection may borrow ``byte_size`` more, or 0."""
        client = self.client
        if self.requests + byte_size <= self.limit and client.requests + byte_size <= client.limit:
            return 0
        if self.requests and self.requests + byte_size > self.limit:
            return min(self.requests, self.requests + byte_size - self.limit)
        return max(0, min(client.requests, client.requests + byte_size - client.limit_of(byte_size)))

    # ----------------------------------------------------------------------------------------------- response arenas

    @property
    def is_full(self) -> bool:
        """Returns whether the answers that the client has not read yet fill the connection's share of memory."""
        return self.answers >= self.limit

    def note_bulky(self, kind: Hashable) -> None:
        """Records that this client's requests of one ``kind`` (model, version, input shapes) have large answers."""
        bulky = self.client.bulky
        if len(bulky) >= _MAX_BULKY:
            bulky.clear()
        bulky.add(kind)

    def may_send(self, kind: Hashable) -> bool:
        """Returns whether the connection may send a request now. ``kind``: the request's model, version and input shapes.

        Returns False if the connection has too many unread bytes of answers. Also returns False if all connections of the
        client together have too many unread bytes, and earlier requests of this ``kind`` had large answers.
        """
        return not self.is_full and not (self.client.answers >= self.client.limit and kind in self.client.bulky)

    def describe(self) -> str:
        """Returns an error text, which says how many bytes of answers wait for the client and how many may wait."""
        client = self.client
        if self.is_full:
            return f"this connection has not taken {self.answers} bytes of its answers, at most {self.limit} may wait for it"
        return f"{client.answers} bytes of answers wait for clients of {client.owner}, at most {client.limit} may"

    def describe_requests(self, byte_size: int) -> str:
        """Returns the error text for a request that got no ``byte_size`` bytes of arena memory because a limit was reached."""
        client = self.client
        if self.requests and self.requests + byte_size > self.limit:
            return (
                f"the requests of this connection take {self.requests} bytes, {byte_size} more make over {self.limit}"
            )
        limit = client.limit_of(byte_size)
        return f"the requests of {client.owner} take {client.requests} bytes, {byte_size} more make over {limit}"

    def __repr__(self) -> str:
        return f"<Account of {self.client.owner}: {self.requests} of requests, {self.answers} of answers>"


class Accounts:
    """Opens and closes the accounts of a front's connections. Each counts the arena bytes that its connection holds."""

    def __init__(self, options: Arenas, small_byte_size: int, medium_byte_size: int) -> None:
        """Stores the limits on arena memory from ``options``, and the sizes by which a lease is small, medium or large.

        A lease of up to ``small_byte_size`` bytes is small, and a larger lease of up to ``medium_byte_size`` bytes is medium.
        """
        self._sizes = small_byte_size, medium_byte_size, options.max_byte_size
        self._connection_limit = part(options, options.connection_share)
        self._client_limit = part(options, options.client_share)
        self._clients: dict[str, ClientAccount] = {}
        #: How many are looked through for those that are gone.
        self._many = _MANY

    def open(self, owner: str) -> Account:
        """Opens an account for a new connection. ``owner``: the client's user ("uid 1000") or TCP host ("tcp 10.0.0.5")."""
        client = self._clients.get(owner)
        if client is None:
            self._forget_gone()
            client = self._clients[owner] = ClientAccount(owner, self._client_limit, self._sizes)
        client.accounts += 1
        return Account(client, self._connection_limit)

    def close(self, account: Account) -> None:
        """Closes the account of a connection that is gone. Memory that the connection still holds counts for its client."""
        account.client.accounts -= 1

    def _forget_gone(self) -> None:
        if len(self._clients) < self._many:
            return
        for client in list(self._clients.values()):
            if not (client.accounts or client.requests or client.answers):
                del self._clients[client.owner]
        self._many = max(_MANY, 2 * len(self._clients))

    def __len__(self) -> int:
        return len(self._clients)

    def __repr__(self) -> str:
        return f"<Accounts of {len(self._clients)} clients>"


def part(options: Arenas, share: float) -> int:
    """Returns ``share`` times ``options.max_byte_size``, rounded down. Returns sys.maxsize if ``share`` is 1 or more."""
    return int(options.max_byte_size * share) if share < 1 else sys.maxsize
