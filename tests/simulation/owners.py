"""Clients with memory of their own, which they hand over sealed, and the end of regions with whom they belong to.

An owner is a process with a connection to the clients' socket. It registers memfds there, also again, and such as are not sealed
or come with no descriptor or two, and unregisters names; it closes its connection, connects again, or is killed.

``regions.reclaim`` is drawn for each run. What must hold beside what ``region_clients`` says:

* ``never``: whoever ends, a region stays until it is unregistered.
* ``owner``, ``connection``: a region goes when the process has ended that registered it last, or the connection was closed, by
  whomever, or with its front; and not before. What somebody else registers again in the meantime stays his: once he was told that
  it is registered, the end of the one before does nothing to it.
* It goes as by "unregister": requests that use it end well, its name is free, and at rest nothing of it is listed.
* Memory that is not sealed is refused, and nothing of it is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import socket
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from tensord.daemon.front import peer
from tests.simulation.regions import PREFIX, Call, File
from tests.simulation.scheduler import SECOND, Process, Scheduler, eventfd

if TYPE_CHECKING:
    from tests.simulation.region_clients import RegionClients

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: How long a client waits until it connects again to a daemon that is not there.
_RETRY_NS = SECOND // 20
_MOST_OWNERS = 3
#: The faults of a registration, each as a part of the error that the daemon answers it with.
_WRONG = ("lacks the seals", "0 descriptors came", "2 descriptors came")
_DOES = {"register": 6, "again": 3, "unregister": 3, "wrong": 1, "start": 1, "close": 1, "kill": 1}


class Sealed(File):
    """A memfd whose size nobody can change."""

    sealed = True

    def _open(self) -> int:
        fd = os.memfd_create(self.key, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, self.full_size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd


class Link:
    """An owner's connection to the clients' socket."""

    def __init__(self, owner: Owner, sock: socket.socket) -> None:
        self.client = owner
        self.sock = sock
        self.closed = False


class Owner(Process):
    """A client that hands memory over: its process."""

    def __init__(self, scheduler: Scheduler, owners: Owners, name: str) -> None:
        super().__init__(scheduler, name)
        self._owners = owners
        self.link: Link | None = None
        self._waiting: deque[Call] = deque()
        self._asked: deque[Call] = deque()
        self._poll = select.poll()
        self._retry_ns = self._opened_ns = 0
        #: True if the owner closes its connection in its next turn.
        self.closes = False
        #: When the process began, and when it ended, in ns; 0: it has not ended. Requests are judged by these, as by a front's.
        self.started_ns, self.ended_ns = scheduler.clock.now_ns, 0

    @property
    def serves(self) -> bool:
        return self.alive

    def queue(self, call: Call) -> None:
        self._waiting.append(call)
        self.idle = False

    def iterate(self) -> bool:
        while self._waiting and self._waiting[0].gone_ns:
            self._waiting.popleft()
        if self.closes:
            self.closes = False
            if self.link is not None:
                self.scheduler.tell(f"{self} closes its connection")
                self._lose()
                return True
        if self.link is None:
            return bool(self._waiting) and self.scheduler.clock.now_ns >= self._retry_ns and self._connect()
        readable = bool(self._poll.poll(0))
        if self._waiting and not (readable and self.scheduler.chance.random() < 0.5):
            self._send(self.link)
        elif readable:
            self._receive(self.link)
        return readable or bool(self._waiting)

    def due_ns(self) -> int | None:
        return self._retry_ns if self.link is None and self._waiting else None

    def sockets(self) -> list[socket.socket]:
        return [] if self.link is None else [self.link.sock]

    def _connect(self) -> bool:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(self._owners.path)
        except OSError:  # no daemon is there, or it is full
            sock.close()
            self._retry_ns = self.scheduler.clock.now_ns + _RETRY_NS
            return False
        self._owners.opened(self, sock)
        self._poll.register(sock, select.POLLIN)
        self.link, self._opened_ns = Link(self, sock), self.scheduler.clock.now_ns
        return True

    def _send(self, link: Link) -> None:
        call = self._waiting[0]
        try:
            with self._owners.given(call) as (content, fds):
                socket.send_fds(link.sock, [content], fds)
        except BlockingIOError:
            return
        except OSError:
            self._lose()
            return
        call.connection = link
        self._asked.append(self._waiting.popleft())

    def _receive(self, link: Link) -> None:
        try:
            content = link.sock.recv(1 << 16)
        except OSError:
            content = b""
        if not content:
            self._lose()
        elif not self._asked:
            # Who has asked nothing yet is told as well that there is no descriptor for its connection.
            error = json.loads(content)["error"]
            if not self._owners.regions.lacked_for(error, self._opened_ns):
                self.scheduler.defect(f"{self} is told what it has not asked: {content!r}")
        else:
            self._owners.regions.ended(self._asked.popleft(), json.loads(content).get("error", ""))

    def _lose(self) -> None:
        """Handles the end of the connection, whoever has closed it."""
        link, self.link = self.link, None
        if link is not None:
            self._poll.unregister(link.sock)
            link.closed = True
            link.sock.close()
        for call in self._asked:
            self._owners.regions.lost(call)
        self._asked.clear()
        self._owners.note_ends()

    def end(self) -> None:
        self.scheduler.tell(f"{self} is killed")
        self.alive, self.ended_ns = False, self.scheduler.clock.now_ns
        for call in self._waiting:
            self._owners.regions.lost(call)
        self._waiting.clear()
        self._lose()
        self._owners.client_ended(self)
        self.scheduler.wake()


class Owners:
    """All owners of a run; and who the owner of each region is, whose end it ends with."""

    def __init__(self, regions: RegionClients, scheduler: Scheduler, path: str, reclaim: str) -> None:
        self.regions = regions
        self.path = path
        self._scheduler = scheduler
        self.reclaim = reclaim
        self._started = self._bound = 0
        self.living: list[Owner] = []
        #: A client's process -> an eventfd that is readable once the process has ended; its sockets' name -> the process.
        self._dead: dict[Process, int] = {}
        self._named: dict[bytes, Process] = {}
        #: A process of the daemon -> the objects by which it learns that clients' connections have ended.
        self._told: dict[Process | None, list[peer.ConnectionEnd]] = {}

    # --------------------------------------------------------------------------------------------------- what happens

    def happen(self, chance: random.Random) -> None:
        """Has an owner do something."""
        regions = self.regions
        if not self.living:
            self._start()
        owner = chance.choice(self.living)
        free = [name for name in regions.names if not any(call.model in (name, "") for call in regions.open)]
        sealed = [name for name in free if (call := regions.last(name)) is not None and call.files[-1].sealed]
        match chance.choices(list(_DOES), list(_DOES.values()))[0]:
            case "start" if len(self.living) < _MOST_OWNERS:
                self._start()
            case "close":
                owner.closes, owner.idle = True, False
            case "kill":
                self.kill(owner)
            case "again" if sealed and (call := regions.last(chance.choice(sealed))) is not None:
                regions.register_again(call.model, call, [owner], chance)
            case "unregister" if sealed:
                regions.call("unregister", chance.choice(sealed), [owner], chance)
            case "wrong":
                regions.register(
                    chance.choice(free) if free else "r0",
                    self._file(chance),
                    owner,
                    chance,
                    wrong=chance.choice(_WRONG),
                )
            case _:
                self._register(chance)

    def _register(self, chance: random.Random) -> None:
        """Has an owner hand over memory under a name that is free, or a new one."""
        regions = self.regions
        if not self.living:
            self._start()
        busy = {call.model for call in regions.open}
        free = [name for name in regions.names if name not in busy and not regions.registered(name)]
        if free or len(regions.names) < 6:
            name = chance.choice(free) if free else regions.new_name()
            regions.register(name, self._file(chance), chance.choice(self.living), chance)

    def end_one(self, chance: random.Random) -> None:
        """Ends whom a region belongs to, his process or his connection."""
        there = [
            call
            for name in self.regions.names
            for call in self.regions.registered(name)
            if call.connection is not None and (self.reclaim == "owner" or not call.connection.closed)
        ]
        if not there:
            self._register(chance)
            return
        if chance.random() < 0.4:
            # Whoever has registered it before may end as well.
            self._again(chance.choice(there), chance)
            return
        call = chance.choice(there)
        if chance.random() < 0.5:
            # Somebody else registers it as his, and the supervisor may learn of both in one iteration.
            self._again(call, chance)
            with self._supervisor_stopped(chance):
                self._end(call, chance)
        else:
            self._end(call, chance)

    def _again(self, call: Call, chance: random.Random) -> None:
        """Has somebody else register a region as it is."""
        others = [each for each in self.living if each is not call.connection.client]
        if (last := self.regions.last(call.model)) is not None:
            self.regions.register_again(call.model, last, others, chance)

    @contextlib.contextmanager
    def _supervisor_stopped(self, chance: random.Random) -> Iterator[None]:
        """Has the supervisor do nothing, now and then, for a while before and after the block."""
        supervisor = self.regions.supervisor
        if supervisor.stopped or chance.random() < 0.4:
            yield
            return
        self._scheduler.tell(f"{supervisor} is stopped for a moment")
        supervisor.stopped = True
        for _ in range(chance.randrange(chance.choice((30, 400)))):
            self._scheduler.turn()
        yield
        for _ in range(chance.randrange(chance.choice((30, 400)))):
            self._scheduler.turn()
        supervisor.stopped = supervisor.idle = False

    def _end(self, call: Call, chance: random.Random) -> None:
        link, client = call.connection, call.connection.client
        if isinstance(link, Link):
            if chance.random() < 0.5 and client.alive:
                self.kill(client)
            else:
                client.closes, client.idle = True, False
        elif chance.random() < 0.5 and client.alive and not client.changes:
            client.clients.network.kill(client)
        elif not (link.closed or link.private):
            link.cut = True
            client.busy[link], client.idle = None, False

    def _start(self) -> None:
        self._started += 1
        owner = Owner(self._scheduler, self, f"owner {self._started}")
        self.living.append(owner)
        self._scheduler.processes.append(owner)

    def kill(self, owner: Owner) -> None:
        self.living.remove(owner)
        owner.end()
        self._scheduler.processes.remove(owner)

    def _file(self, chance: random.Random) -> File:
        return self.regions.add(Sealed, f"{PREFIX}{self.regions.prefix}", chance)

    @contextlib.contextmanager
    def given(self, call: Call) -> Iterator[tuple[bytes, list[int]]]:
        """Yields what is sent for a call, and the descriptors that go with it."""
        question: dict[str, Any] = {"name": call.model}
        fds = [call.files[-1].fd] if call.files else []
        if call.kind == "register":
            question |= {"byte_size": call.byte_size, "offset": call.offset}
        with contextlib.ExitStack() as stack:
            if call.wrong == _WRONG[0]:
                fds = [os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)]
                stack.callback(os.close, fds[0])
                os.ftruncate(fds[0], call.files[-1].full_size)
            elif call.wrong:
                fds *= int(call.wrong[0])
            yield json.dumps({call.kind: question}).encode(), fds

    # ------------------------------------------------------------------------------------------------- who has ended

    def opened(self, client: Process, sock: socket.socket) -> None:
        """Has a client's socket bear a name by which the daemon's side finds its process, as the kernel does."""
        if self.reclaim == "owner":
            self._bound += 1
            name = f"\0tensord simulation {self.regions.prefix}{self._bound}"
            sock.bind(name)
            self._named[name.encode()] = client

    def client_ended(self, client: Process) -> None:
        """Notes that a client's process has ended."""
        if self.reclaim == "owner":
            os.eventfd_write(self._dead_fd(client), 1)
            self.note_ends()

    def _dead_fd(self, client: Process) -> int:
        if client not in self._dead:
            self._dead[client] = eventfd()
        return self._dead[client]

    def process_ended(self, process: Process | None) -> None:
        """Closes what a process of the daemon had that tells of the ends of its connections."""
        for end in self._told.pop(process, ()):
            end._release()
        self.note_ends()

    def note_ends(self) -> None:
        """Notes which regions go because those that registered them have ended."""
        if self.reclaim != "never":
            self.regions.note_ends(self._has_ended)

    def _has_ended(self, call: Call) -> bool:
        link = call.connection
        if link is None:
            return False
        if self.reclaim == "owner":
            return not link.client.alive
        if link.closed or not link.client.alive or not getattr(link, "front", link.client).alive:
            return True
        if link.sock is None:
            return False
        poll = select.poll()
        poll.register(link.sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def judge_watched(self) -> None:
        """Checks, at rest, that each region is watched that is to go with its owner, and that none is there without its owner."""
        for name, region in self.regions.registry._regions.items():
            if (region.watch is None) is (self.reclaim != "never"):
                self._scheduler.defect(
                    f"region '{name}' is watched by {region.watch} where 'reclaim' is {self.reclaim}"
                )
            elif region.watch is not None:
                poll = select.poll()
                if region.watch.fd >= 0:
                    poll.register(region.watch.fd, select.POLLIN)
                if region.watch.fd < 0 or poll.poll(0):
                    self._scheduler.defect(f"region '{name}' is there, and its owner has ended")

    # --------------------------------------------------------------------------------------------------- what is replaced

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the simulation in the place of the kernel, which knows whose a socket is, and closes what the dead had open."""
        descriptor = peer.ConnectionEnd.descriptor

        def pidfd(fd: int) -> int:
            try:
                with peer._opened(fd) as sock:
                    name = sock.getpeername()
            except OSError:
                return -1
            client = self._named.get(name if isinstance(name, bytes) else name.encode())
            # Of a process that has no descriptors left every other one fails as well.
            return -1 if client is None else self._scheduler.given(lambda: os.dup(self._dead_fd(client)))

        def told(end: peer.ConnectionEnd) -> Any:
            ends = self._told.setdefault(self._scheduler.current, [])
            if end not in ends:
                ends.append(end)
            return descriptor(end)

        with contextlib.ExitStack() as stack:
            if self.reclaim == "owner":
                stack.enter_context(mock.patch.object(peer, "_pidfd", pidfd))
            stack.enter_context(mock.patch.object(peer.ConnectionEnd, "descriptor", told))
            yield

    def links(self) -> int:
        """Returns how many connections to the clients' socket owners have."""
        return sum(owner.link is not None for owner in self.living)

    def close(self) -> None:
        """Ends all owners."""
        for owner in list(self.living):
            self.kill(owner)

    def free(self) -> None:
        """Frees what the kernel had for them."""
        for fd in self._dead.values():
            os.close(fd)
        for process in list(self._told):
            self.process_ended(process)
        self._dead.clear()
        self._named.clear()
