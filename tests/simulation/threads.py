"""A client's process: its threads, and its event loop, are greenlets, each of which gives its turn away wherever it would wait.

The client's own code runs as it is. What it waits with is replaced: locks, queues, conditions, sleeps, and sockets.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import queue
import select
import socket
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import greenlet  # type: ignore[import-untyped]
from tensord_client import clients_socket, lane, lane_request, lane_socket, worker_lane
from tensord_client.common import pending as pending_module
from tensord_client.lane import LaneConnection
from tensord_client.lane_socket import AT_ONCE, LaneSocket
from tensord_client.worker_lane import ClientLane

from tests.simulation.scheduler import Death, Loop, Process, Scheduler


class ClientThread:
    """A thread of a client's process, which runs until it waits."""

    def __init__(self, process: ClientProcess, target: Callable[..., object], arguments: tuple[Any, ...] = ()) -> None:
        self._process = process
        self._target, self._arguments = target, arguments
        self.greenlet = greenlet.greenlet(self._run, process.hub)
        self.ready: Callable[[], object] = _always
        #: When it goes on at the latest, in seconds of the simulated clock.
        self.until: float | None = None

    def start(self) -> None:
        self._process.running_threads.append(self)

    def _run(self) -> None:
        try:
            self._target(*self._arguments)
        except Death:
            pass
        except BaseException as error:
            self._process.scheduler.defect(f"a thread of {self._process} ends with {error!r}")
        finally:
            self._process.running_threads.remove(self)
            self._target, self._arguments = _always, ()

    def goes_on(self, now: float) -> bool:
        return bool((self.until is not None and self.until <= now) or self.ready())

    def wait(self, ready: Callable[[], object], until: float | None) -> bool:
        """Lets others run until ``ready()`` or the time has come. Returns what ``ready()`` says then."""
        self.ready, self.until = ready, until
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        self._process.hub.switch()
        if not self._process.alive:
            raise Death
        asyncio._set_running_loop(running)
        return bool(ready())


class ClientProcess(Process):
    """A process of a program that asks over lanes of its own."""

    def __init__(self, scheduler: Scheduler, name: str, path: str) -> None:
        super().__init__(scheduler, name)
        self.hub = greenlet.getcurrent()
        self.path = path
        self.connection: LaneConnection | None = None
        self.running_threads: list[ClientThread] = []
        self.thread: ClientThread | None = None
        #: Its sockets to the supervisor that are open.
        self.sockets_opened: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._loop: Loop | None = None

    @property
    def serves(self) -> bool:
        return self.alive

    def call_soon(self, call: Callable[[], object]) -> None:
        """Has a new thread call a function."""
        ClientThread(self, call).start()
        self.idle = False

    @property
    def loop(self) -> Loop:
        """Returns its event loop, which the first use starts in a thread."""
        if self._loop is None:
            self._loop = Loop(self)
            self.call_soon(self._run_loop)
        self.idle = False
        return self._loop

    def _run_loop(self) -> None:
        loop, thread = self._loop, self.thread
        assert loop is not None
        assert thread is not None
        while True:
            loop.iterate()
            while self.jobs:
                ClientThread(self, self.jobs.popleft()).start()
            due = loop.due_ns()
            thread.wait(lambda: loop._ready or loop.chosen._epoll.poll(0), None if due is None else due / 1e9)  # type: ignore[attr-defined]

    def turn(self) -> bool:
        now, threads = self.scheduler.clock.seconds(), self.running_threads
        # The next that can go on, from one that is drawn: to look at all takes long where many wait.
        first = self.scheduler.chance.randrange(len(threads)) if len(threads) > 1 else 0
        order = itertools.chain(range(first, len(threads)), range(first))
        self.thread = next((threads[at] for at in order if threads[at].goes_on(now)), None)
        if self.thread is None:
            return False
        try:
            self.thread.greenlet.switch()
        finally:
            self.thread = None
            asyncio._set_running_loop(None)
        return True

    def due_ns(self) -> int | None:
        untils = [thread.until for thread in self.running_threads if thread.until is not None]
        return int(min(untils) * 1e9) + 1 if untils else None

    def sockets(self) -> list[socket.socket]:
        lanes = self.lanes()
        return [*self.sockets_opened, *(each.socket.sock for each in lanes)]

    def lanes(self) -> list[ClientLane]:
        connection = self.connection
        return [] if connection is None else [*connection._lanes.values(), *connection._former]

    def end(self) -> None:
        """Ends the process: nothing of it runs any more, and its sockets close."""
        if not self.alive:
            return
        self.alive = False
        self.close_sockets()
        self.scheduler.tell(f"{self} has ended")
        self.scheduler.wake()

    def bury(self) -> None:
        for thread in list(self.running_threads):
            if thread.greenlet.dead or not thread.greenlet:
                self.running_threads.remove(thread)
            else:
                thread.greenlet.throw(Death())
        asyncio._set_running_loop(None)
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        for sock in self.sockets_opened:
            sock.close()
        if self._loop is not None:
            self._loop.bury()


def _always() -> bool:
    return True


#: The size of a narrow socket as the kernel takes it, which doubles it: the largest datagram fits, or some ninety small ones.
_NARROW = 33_000
#: The scheduler whose clients run.
_scheduler: list[Scheduler] = []


def wait(ready: Callable[[], object], until: float | None) -> bool:
    """Has the running thread wait. Returns what ``ready()`` says then."""
    process = _scheduler[0].current
    if ready():
        return True
    if not isinstance(process, ClientProcess) or not process.alive:
        raise Death  # of a dead process, whose threads are ended
    assert process.thread is not None
    return process.thread.wait(ready, until)


def pause() -> None:
    """Lets others run before the running thread goes on, now and then."""
    process = _scheduler[0].current
    if isinstance(process, ClientProcess) and process.alive and process.thread and _scheduler[0].chance.random() < 0.3:
        process.thread.wait(_always, None)


def _polled(sock: socket.socket) -> Callable[[], object]:
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return lambda: poll.poll(0)


def _after(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


# ------------------------------------------------------------------------------------------------- what is replaced


class Lock:
    def __init__(self) -> None:
        self.held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.held and not (blocking and wait(lambda: not self.held, _after(timeout if timeout >= 0 else None))):
            return False
        self.held = True
        return True

    def release(self) -> None:
        self.held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition whose lock nobody need take: between two waits a thread is alone."""

    def __init__(self, lock: object = None) -> None:
        self._notified = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        before = self._notified
        return wait(lambda: self._notified != before, _after(timeout))

    def notify(self) -> None:
        self._notified += 1

    notify_all = notify


class SimpleQueue:
    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        if not wait(lambda: self._items, _after(timeout)):
            raise queue.Empty
        return self._items.popleft()


class Poll:
    """Stands for ``select.poll``."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register = self._poll.register

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        wait(lambda: self._poll.poll(0), _after(None if timeout is None else timeout / 1000))
        return self._poll.poll(0)


class Socket(socket.socket):
    """A socket to the supervisor."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        process = _scheduler[0].current
        if isinstance(process, ClientProcess):
            process.sockets_opened.add(self)

    def recvmsg(self, *arguments: Any) -> Any:
        if not wait(_polled(self), _after(self.gettimeout())):
            raise TimeoutError("timed out")
        return super().recvmsg(*arguments)


@contextlib.contextmanager
def in_place(scheduler: Scheduler) -> Iterator[None]:
    """Puts the simulation in the place of what a client waits with, as long as the block runs."""

    def thread(target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", daemon: bool = False) -> Any:
        process = scheduler.current
        if not isinstance(process, ClientProcess) or not process.alive:
            raise RuntimeError("no thread of a dead process is started")
        return ClientThread(process, target, args)

    def start_new_thread(target: Callable[..., None], args: tuple[Any, ...]) -> None:
        thread(target, args).start()

    threads = types.SimpleNamespace(Thread=thread, Lock=Lock, Condition=Condition, RLock=threading.RLock)
    queues = types.SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty)
    raw_threads = types.SimpleNamespace(start_new_thread=start_new_thread)
    sockets = types.SimpleNamespace(**{**vars(socket), "socket": Socket})
    polls = types.SimpleNamespace(**{**vars(select), "poll": Poll})
    receive, begin = ClientLane.receive, LaneSocket.__init__
    close, send_at_once, send = ClientLane.close, LaneSocket.send_at_once, LaneConnection._send
    add_done_callback = pending_module.Pending.add_done_callback

    def received(self: ClientLane, flags: int = 0, left_ns: int = 0) -> bool:
        if not flags:
            wait(_polled(self.socket.sock), _after(left_ns / 1e9 if left_ns else None))
        return receive(self, AT_ONCE)

    def begun(self: LaneSocket, sock: socket.socket, spin_ns: int) -> None:
        begin(self, sock, spin_ns)
        # What C receives it does not wait for: the client's own code waits on.
        sock.setblocking(False)
        if scheduler.narrow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NARROW)

    def closed(self: ClientLane, error: Any) -> None:
        self._why = error
        self.socket.shut_down()
        wait(lambda: not self.reading.held, None)
        close(self, error)

    def sent_at_once(self: LaneSocket, *arguments: Any) -> bool:
        return not scheduler.is_full() and send_at_once(self, *arguments)

    def sent(self: LaneConnection, *arguments: Any) -> bool:
        pause()
        return send(self, *arguments)

    def added(self: Any, callback: Any) -> None:
        pause()
        add_done_callback(self, callback)

    def sleep(seconds: float) -> None:
        wait(lambda: False, _after(seconds))

    _scheduler.append(scheduler)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (lane, "threading", threads),
            (lane_request, "threading", threads),
            (worker_lane, "threading", threads),
            (worker_lane, "queue", queues),
            (worker_lane, "_thread", raw_threads),
            (lane_socket, "_thread", raw_threads),
            (lane_socket, "select", polls),
            (pending_module, "threading", threads),
            (pending_module, "queue", queues),
            (clients_socket, "socket", sockets),
            (ClientLane, "receive", received),
            (ClientLane, "close", closed),
            (LaneSocket, "__init__", begun),
            (LaneSocket, "send_at_once", sent_at_once),
            (LaneConnection, "_send", sent),
            (pending_module.Pending, "add_done_callback", added),
            (time, "sleep", sleep),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
    _scheduler.clear()
