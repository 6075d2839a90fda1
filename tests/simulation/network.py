"""Clients that ask fronts over sockets: their processes and connections. What they send comes late, and cut at any byte.

In a turn a client's process connects, writes a request down, sends some bytes, or reads some, on one connection.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Union

from tests.simulation.history import Change
from tests.simulation.processes import FrontProcess
from tests.simulation.scheduler import SECOND, Process, Scheduler

if TYPE_CHECKING:
    from tests.simulation.clients import Ask, Clients

#: What a client sends: a request, or a change of a model.
Item = Union["Ask", Change]
#: How long a daemon that has got SIGTERM takes requests on open connections, in ns.
LAST_CALL_NS = 250_000_000
#: A client that reads nothing for so long is cut off, in ns.
_UNREAD_NS = 30 * SECOND
#: The connections of one client to one front that are opened by chance; more are if there is no other way.
_MOST = 3


class Connection:
    """A client's connection to a front, which a subclass speaks a protocol on."""

    def __init__(self, client: NetworkClient, front: FrontProcess, private: bool = False) -> None:
        self.client = client
        self.clients = client.clients
        self.scheduler = client.scheduler
        self.front = front
        #: Nobody else uses it, and nobody cuts it.
        self.private = private
        self.number = client.clients.network.number()
        self.sock: socket.socket | None = None
        #: Nothing is sent or received any more.
        self.closed = False
        #: The daemon has said that it takes nothing more over this connection.
        self.ends = False
        #: Its client closes it with its next turn.
        self.cut = False
        #: The daemon reads nothing any more.
        self.broken = False
        #: Requests that are not written down yet.
        self.waiting: deque[Item] = deque()
        self.out = bytearray()
        self._queued = self._sent = 0
        #: Where each request ends in what is sent.
        self._marks: deque[tuple[int, Item]] = deque()
        self._chops = self.scheduler.chance.random() < 0.3
        #: Since when a part of a request has left and the rest has not, and the longest of such times.
        self._partial_ns = self._slowest_ns = 0
        #: The longest time for which its client did nothing, or did not read.
        self.slept_ns = 0
        #: Since when and until when its client does not read it; 0: it has always read it.
        self.rests_since_ns = self.rests_until_ns = 0
        #: When its client has last looked in vain for what it waits for.
        self.looked_ns = 0
        #: When it was opened, and when it last brought something.
        self.opened_ns = self.used_ns = self.scheduler.clock.now_ns

    @property
    def usable(self) -> bool:
        """Returns whether more may be asked over it."""
        if self.closed or self.ends or self.cut or not self.client.alive:
            return False
        # One that is open may be used until its front says that it ends.
        return self.front.serves or (self.sock is not None and self.front.alive)

    @property
    def has_work(self) -> bool:
        return bool(self.out or self.writes or self.cut or self.sock is None)

    @property
    def writes(self) -> bool:
        """Returns whether a request is to be written down. Behind the last one of a connection nothing is asked."""
        return bool(self.waiting) and not self.ends

    def queue(self, item: Item) -> None:
        """Has a request sent, behind those before it."""
        self.waiting.append(item)
        self.client.busy[self] = None
        self.client.idle = False

    def act(self, readable: bool) -> bool:
        """Does one thing. Returns False if there was nothing to do."""
        chance = self.scheduler.chance
        if self.cut:
            self.close()
        elif self.sock is None:
            self._connect()
        elif readable and (not (self.out or self.writes) or chance.random() < 0.5):
            return self._receive()
        elif self.out and (not self.writes or chance.random() < 0.7):
            return self._send()
        elif self.writes:
            self._write_next()
        return True

    def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self.front.path)
        except OSError:
            sock.close()
            if self.front.serves and not self.clients.stopped_ns:
                self.scheduler.defect(f"{self} is refused by a front that serves")
            self._over()
            return
        self.sock, self.opened_ns = sock, self.scheduler.clock.now_ns
        self.client.opened(self, sock)
        self.begin()

    def _write_next(self) -> None:
        item = self.waiting.popleft()
        if self.clients.goes_on(item):
            self.write(item)

    def put(self, content: bytes, item: Item | None = None) -> None:
        """Adds bytes to those that are sent. ``item``: the request that ends with them."""
        self.out += content
        self._queued += len(content)
        if item is not None:
            self._marks.append((self._queued, item))
        self.client.busy[self] = None

    def _send(self) -> bool:
        chance, size = self.scheduler.chance, len(self.out)
        if self._chops:
            size = min(size, chance.choice((1, chance.randrange(1, size + 1), chance.randrange(1, size + 1), size)))
        assert self.sock is not None
        try:
            count = self.sock.send(memoryview(self.out)[:size])
        except BlockingIOError:
            return False
        except OSError:
            # What it has said before is still to be read.
            self.out.clear()
            self.broken = True
            return True
        del self.out[:count]
        self._sent += count
        marks, now_ns = self._marks, self.scheduler.clock.now_ns
        self._slowest_ns = self.slowest_ns
        while marks and marks[0][0] <= self._sent:
            marks.popleft()[1].sent_ns = now_ns
            self._partial_ns = 0
        self._partial_ns = (self._partial_ns or now_ns) if self.out else 0
        return True

    def awaits(self) -> None:
        """Notes that a request has begun, and that its rest is sent once the daemon lets its client send on."""
        if self not in self.client.awaiting:
            self.client.awaiting[self], self.looked_ns = None, self.scheduler.clock.now_ns

    def sends_on(self) -> None:
        """Notes that the daemon lets its client send on. It may have done so as soon as that had last looked in vain."""
        if self in self.client.awaiting:
            del self.client.awaiting[self]
            self._partial_ns = self._partial_ns or self.looked_ns

    @property
    def slowest_ns(self) -> int:
        """Returns the longest time for which the rest of a request did not leave."""
        return max(self._slowest_ns, self._partial_ns and self.scheduler.clock.now_ns - self._partial_ns)

    def _receive(self) -> bool:
        size = self.scheduler.chance.choice((1, 300, 1 << 16, 1 << 16)) if self._chops else 1 << 16
        assert self.sock is not None
        try:
            data = self.sock.recv(size)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self.used_ns = self.scheduler.clock.now_ns
            self.received(data)
        else:
            self._over()
        return True

    def close(self) -> None:
        """Closes it as a client does that wants nothing more."""
        self._free()
        for item in [*self.unanswered(), *self.waiting]:
            self.clients.left(item)

    def _over(self) -> None:
        """Handles its end, which the daemon has brought about."""
        self._free()
        waiting, self.waiting = self.waiting, deque()
        if self.front.alive or not self.front.status:
            self.lost()
        else:
            for item in list(self.unanswered()):
                self.clients.front_died(item)
        for item in waiting:
            self.clients.ask_again(item)

    def _free(self) -> None:
        self.closed = True
        self.out.clear()
        self.client.closed(self, self.sock)
        if self.sock is not None:
            self.sock.close()
        self.clients.regions.owners.note_ends()

    def rest(self, seconds: float) -> None:
        """Has its client read nothing for so long from now on; a rest that has begun goes on, and may end earlier."""
        now_ns = self.scheduler.clock.now_ns
        if self not in self.client.resting:
            self.rests_since_ns = now_ns
        self.rests_until_ns = now_ns + int(seconds * SECOND)
        self.client.resting[self] = None

    def go_on(self, now_ns: int) -> None:
        """Has its client read again if it is time."""
        if self.rests_until_ns <= now_ns:
            del self.client.resting[self]
            self.slept_ns = max(self.slept_ns, now_ns - self.rests_since_ns)

    @property
    def unread(self) -> bool:
        """Returns whether its client has not read for so long that the daemon may cut it off."""
        return self.slept_ns > _UNREAD_NS * 0.9

    def refused_now(self, item: Item) -> str:
        """Returns why the daemon may close the connection without an answer to a request; "": it may not."""
        clients = self.clients
        if clients.stopped_ns:
            sent_ns = item.sent_ns
            if not sent_ns or sent_ns > clients.stopped_ns + LAST_CALL_NS:
                return "the daemon is stopping"
        return "its client does not read" if self.unread else ""

    # --------------------------------------------------------------------------------------------- what a protocol does

    def begin(self) -> None:
        """Sends what comes first."""

    def write(self, item: Item) -> None:
        """Adds a request to what is sent."""
        raise NotImplementedError

    def received(self, data: bytes) -> None:
        """Takes bytes of the daemon."""
        raise NotImplementedError

    def lost(self) -> None:
        """Judges that the daemon has closed the connection, and has asked again what it did not take."""
        raise NotImplementedError

    def unanswered(self) -> Iterable[Item]:
        """Returns the requests that were written down and have no answer."""
        raise NotImplementedError

    def watched(self) -> list[bool | None]:
        """Returns of each open watch what it was told last: whether the daemon serves."""
        return []

    def leave(self, item: Item) -> bool:
        """Takes a request back. Returns False if that is not possible but by closing the connection."""
        return False

    def __repr__(self) -> str:
        return f"connection {self.number} of {self.client} to {self.front}"


class NetworkClient(Process):
    """A client's process, with connections to fronts."""

    def __init__(self, scheduler: Scheduler, clients: Clients, name: str) -> None:
        super().__init__(scheduler, name)
        self.clients = clients
        self.connections: dict[int, Connection] = {}
        #: Those with something to do, also without an event.
        self.busy: dict[Connection, None] = {}
        #: Connections that this client does not read for a while.
        self.resting: dict[Connection, None] = {}
        #: Connections that wait for the daemon before they send on.
        self.awaiting: dict[Connection, None] = {}
        self._turn_ns = scheduler.clock.now_ns
        self._epoll = select.epoll()

    def opened(self, connection: Connection, sock: socket.socket) -> None:
        self.connections[sock.fileno()] = connection
        self.clients.regions.owners.opened(self, sock)
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def closed(self, connection: Connection, sock: socket.socket | None) -> None:
        self.busy.pop(connection, None)
        self.resting.pop(connection, None)
        self.awaiting.pop(connection, None)
        if sock is not None:
            self._epoll.unregister(sock.fileno())
            del self.connections[sock.fileno()]

    def all(self) -> list[Connection]:
        """Returns all connections, those that are still to be made as well."""
        return list(dict.fromkeys((*self.connections.values(), *self.busy)))

    @property
    def changes(self) -> bool:
        """Returns whether it waits for the end of a change."""
        return any(connection.private for connection in self.all())

    def iterate(self) -> bool:
        now_ns = self.scheduler.clock.now_ns
        slept_ns, self._turn_ns = now_ns - self._turn_ns, now_ns
        if slept_ns > SECOND:
            for each in self.connections.values():
                each.slept_ns = max(each.slept_ns, slept_ns)
        for each in list(self.resting):
            each.go_on(now_ns)
        found = (self.connections[fd] for fd, _ in self._epoll.poll(0))
        readable = {connection: True for connection in found if connection not in self.resting}
        for each in self.awaiting:
            if each not in readable and each not in self.resting:
                each.looked_ns = now_ns
        able = [*readable, *(each for each in self.busy if each not in readable)]
        if not able:
            return False
        connection = able[self.scheduler.chance.randrange(len(able))]
        did = connection.act(connection in readable)
        if not connection.has_work:
            self.busy.pop(connection, None)
        return did or len(able) > 1

    def due_ns(self) -> int | None:
        return min((each.rests_until_ns for each in self.resting), default=None)

    def sockets(self) -> list[socket.socket]:
        return []

    def end(self) -> None:
        """Ends the process: its sockets close."""
        self.alive = False
        for connection in self.all():
            connection.close()
        self.clients.regions.owners.client_ended(self)
        self._epoll.close()
        self.scheduler.wake()


class Network:
    """All processes that ask over sockets."""

    def __init__(self, clients: Clients, kinds: dict[str, type[Connection]]) -> None:
        self._clients = clients
        self._scheduler = clients.scheduler
        self._kinds = kinds
        self._numbers = self._started = 0
        self.living: list[NetworkClient] = []

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def start(self) -> None:
        self._started += 1
        client = NetworkClient(self._scheduler, self._clients, f"client {self._started}")
        self.living.append(client)
        self._scheduler.processes.append(client)

    def kill(self, client: NetworkClient) -> None:
        """Ends a client at once, and starts another one."""
        self._scheduler.tell(f"{client} is killed")
        self.end(client)
        self.start()

    def end(self, client: NetworkClient) -> None:
        client.end()
        self.living.remove(client)
        self._scheduler.processes.remove(client)

    def connections(self) -> Iterator[Connection]:
        for client in self.living:
            yield from client.all()

    def route(self, front: FrontProcess, private: bool = False) -> Connection:
        """Returns a connection to a front over which a request is sent, one that is open or a new one."""
        chance = self._scheduler.chance
        client = self.living[chance.randrange(len(self.living))]
        kind = self._kinds[front.protocol]
        if not private:
            known = [each for each in client.all() if each.front is front and each.usable and not each.private]
            if known and (len(known) >= _MOST or chance.random() < 0.9):
                return known[chance.randrange(len(known))]
        connection = kind(client, front, private)
        client.busy[connection] = None
        client.idle = False
        return connection
