"""Runs simulated processes in turns, under a clock of its own. Which process runs next is drawn from a seed.

A Unix socket delivers at once and in causal order: what may come late is its reader. So a delay is a process that is not given a
turn, and two connections overtake each other where a process handles what is ready in another order. Nothing lies between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import random
import select
import selectors
import socket
import threading
from bisect import bisect
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet  # type: ignore[import-untyped]

SECOND = 1_000_000_000
#: The longest that a turn takes, in ns of the simulated clock.
_TURN_NS = 60_000


class Death(KeyboardInterrupt):
    """Ends a process in the middle of what it does."""


class Clock:
    """The simulated time, in ns."""

    def __init__(self) -> None:
        self.now_ns = 1000 * SECOND

    def seconds(self) -> float:
        return self.now_ns / 1e9

    def nanoseconds(self) -> int:
        return self.now_ns


class Selector(selectors.BaseSelector):
    """Says which descriptors are ready, in an order that is drawn; never waits."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._epoll = select.epoll()
        self._keys: dict[int, selectors.SelectorKey] = {}
        self.found = False
        #: False: it says that nothing is ready.
        self.polls = True

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        self._epoll.register(fd, _mask(events))
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._epoll.unregister(fd)
        return self._keys.pop(fd)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        self._epoll.modify(fd, _mask(events))
        return key

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[fileobj if isinstance(fileobj, int) else fileobj.fileno()]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = shuffled(self._chance, self._epoll.poll(0)) if self.polls else []
        self.found = bool(events)
        ready = []
        for fd, mask in events:
            key = self._keys[fd]
            read = selectors.EVENT_READ if mask & ~select.EPOLLOUT else 0
            write = selectors.EVENT_WRITE if mask & ~select.EPOLLIN else 0
            ready.append((key, (read | write) & key.events))
        return ready

    def get_map(self) -> Any:
        return self._keys

    def close(self) -> None:
        self._epoll.close()
        self._keys.clear()


def _mask(events: int) -> int:
    read = select.EPOLLIN if events & selectors.EVENT_READ else 0
    return read | (select.EPOLLOUT if events & selectors.EVENT_WRITE else 0)


def shuffled(chance: random.Random, events: list[Any]) -> list[Any]:
    if len(events) > 1:
        chance.shuffle(events)
    return events


class Loop(asyncio.SelectorEventLoop):
    """An event loop that runs one iteration a turn. What it gives to other threads is a turn of its own."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.chosen = Selector(process.scheduler.chance)
        super().__init__(self.chosen)
        self.set_exception_handler(lambda _, context: process.scheduler.defect(f"{process}: {_described(context)}"))

    def time(self) -> float:
        return self.process.scheduler.clock.seconds()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()

        def end(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not future.done():
                set_outcome(outcome)

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                self.call_soon(end, future.set_exception, error)
            else:
                self.call_soon(end, future.set_result, result)

        self.process.jobs.append(work)
        return future

    def iterate(self) -> bool:
        """Runs an iteration. Returns whether there was anything to do."""
        due = self.due_ns()
        had = bool(self._ready) or (due is not None and due <= self.process.scheduler.clock.now_ns)  # type: ignore[attr-defined]
        asyncio._set_running_loop(self)
        self._thread_id = threading.get_ident()
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            self._thread_id = None  # type: ignore[assignment]
            asyncio._set_running_loop(None)
        return had or self.chosen.found

    def due_ns(self) -> int | None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        return int(scheduled[0].when() * 1e9) + 1 if scheduled else None

    def bury(self) -> None:
        """Ends the loop of a dead process; nothing of it runs."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.set_exception_handler(lambda *_: None)
        self.close()


def _described(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"


class Process:
    """A simulated process. A turn of it is an iteration of its loop, or what one of its threads does next."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.alive = True
        self.stopped = False
        #: Nothing has happened since it last found nothing to do.
        self.idle = False
        #: How often it gets a turn, beside others.
        self.weight = scheduler.weight()
        #: What its other threads are to do.
        self.jobs: deque[Callable[[], None]] = deque()
        self.threads: list[Thread] = []
        #: The one of them that has this turn.
        self.running: Thread | None = None
        #: It dies with so many further datagrams that it sends; -1: it does not.
        self.sends_left = -1
        self.dies_sent = False
        #: It has died in this turn: what it still does is not done.
        self.dies = False
        self.dies_in_run = False
        #: How often there is no descriptor for it when it takes one.
        self.lack = 0.0
        #: There was none for it.
        self.has_lacked = False

    def iterate(self) -> bool:
        """Runs an iteration of its loop. Returns whether there was anything to do."""
        raise NotImplementedError

    def due_ns(self) -> int | None:
        """Returns when it has something to do without an event; None: never."""
        raise NotImplementedError

    def sockets(self) -> list[socket.socket]:
        """Returns the sockets that close with it."""
        raise NotImplementedError

    def close_sockets(self) -> None:
        """Closes the sockets of a process that has ended, as the kernel does: with what it had not read, and the sockets therein.

        Their numbers stay, until ``bury``, with a socket that has no peer: what still has them finds no other process's.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unconnected:
            for sock in self.sockets():
                if sock.fileno() >= 0:
                    os.dup2(unconnected.fileno(), sock.fileno(), inheritable=False)

    def bury(self) -> None:
        """Frees what a dead process leaves in this one."""

    def turn(self) -> bool:
        chance = self.scheduler.chance
        waiting = [thread for thread in self.threads if thread.has_work]
        if (self.jobs or waiting) and chance.random() < 0.5:
            number = chance.randrange(len(waiting) + bool(self.jobs))
            if number < len(waiting):
                waiting[number].turn()
            else:
                self.jobs.popleft()()
            return True
        return self.iterate() or bool(self.jobs or waiting)

    def sends(self, send: Callable[[], Any]) -> Any:
        """Sends a datagram, unless it dies before or with it."""
        if self.dies:
            raise Death
        if self.sends_left == 0:
            self.dies = True
            if self.dies_sent:
                send()
            raise Death
        if self.sends_left > 0:
            self.sends_left -= 1
        return send()

    def __repr__(self) -> str:
        return self.name


class Thread:
    """Stands for ``threading.Thread``: what its owner's queue holds is done in turns of the process that has started it.

    A batch may be run in several turns: others come between where ``pause`` is called.
    """

    def __init__(self, process: Process, target: Callable[[], None]) -> None:
        self._process = process
        self._owner: Any = target.__self__  # type: ignore[attr-defined]
        self._model: Any = None
        self._is_instance = hasattr(self._owner, "_begin")
        self.ident = id(self)
        #: The job that is paused; None: there is none.
        self._paused: greenlet.greenlet | None = None
        self._goes_on: Callable[[], object] = _always

    def start(self) -> None:
        if self._is_instance:
            with self._owner._code():
                self._model = self._owner._begin()
            if self._model is None:
                return
        self._process.threads.append(self)

    @property
    def has_work(self) -> bool:
        return not self._owner._jobs.empty() if self._paused is None else bool(self._goes_on())

    @property
    def is_busy(self) -> bool:
        """Returns whether it has begun a job or is to begin one."""
        return self._paused is not None or self.has_work

    def turn(self) -> None:
        job, paused = None, self._paused
        if paused is None:
            try:
                job = self._owner._jobs.get_nowait()
            except queue.Empty:
                return
            if not self._is_instance:
                job()
                return
            paused = greenlet.greenlet(self._serve)
        self._process.running, self._paused = self, None
        try:
            with self._owner._code():
                paused.switch(job)
        finally:
            self._process.running = None

    def _serve(self, job: Any) -> None:
        if not self._owner._serve(self._model, job):
            self._process.threads.remove(self)

    def pause(self, goes_on: Callable[[], object] | None = None) -> None:
        """Has what runs in this thread go on in a later turn, when ``goes_on()`` is true."""
        self._paused, self._goes_on = greenlet.getcurrent(), goes_on or _always
        self._paused.parent.switch()
        if self._process.dies:
            raise Death

    def end(self) -> None:
        """Ends what runs in it: its process is dead."""
        paused, self._paused = self._paused, None
        if paused is not None:
            with contextlib.suppress(Death):
                paused.throw(Death())

    def is_alive(self) -> bool:
        return self in self._process.threads

    def join(self, timeout: float | None = None) -> None:
        while self.is_alive() and self.has_work:
            self.turn()


def _always() -> bool:
    return True


class Scheduler:
    """Gives turns to processes, and lets time pass."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.uneven = self.chance.random() < 0.7
        #: How often a socket is full when somebody sends: until he looks once more.
        self.full = self.chance.choice((0.0, 0.0, 0.02, 0.3))
        #: Sockets of lanes have room for little, and programs may send much ahead.
        self.narrow = random.Random(f"narrow {seed}").random() < 0.3
        self.clock = Clock()
        self.processes: list[Process] = []
        #: The process that has its turn.
        self.current: Process | None = None
        #: What happened, in words, with the step and the time.
        self.story: deque[str] = deque(maxlen=4000)
        self.step = 0
        self.turns = 0
        #: What is wrong; "": nothing so far.
        self.fault = ""
        #: True once a process has died in the middle of a turn.
        self.cut_short = False
        self.on_death: Callable[[Process], None] = lambda process: None

    def weight(self) -> float:
        """Draws how often a process gets a turn: in some runs all alike, in others some a thousand times as often as others."""
        return 10 ** self.chance.uniform(-3, 0) if self.uneven else 1.0

    def tell(self, what: str) -> None:
        self.story.append(f"{self.step:6} {self.clock.now_ns / 1e9 - 1000:10.6f} s  {what}")

    def defect(self, what: str) -> None:
        """Notes that something is wrong; the first counts."""
        self.tell(f"FAULT: {what}")
        self.fault = self.fault or what

    def is_full(self) -> bool:
        return self.full > 0 and self.chance.random() < self.full

    def lacks(self) -> bool:
        """Returns whether there is no descriptor for the process that has its turn, which takes one."""
        process = self.current
        if process is None or not process.lack or self.chance.random() >= process.lack:
            return False
        process.has_lacked = True
        return True

    def given(self, take: Callable[[], Any]) -> Any:
        """Returns what ``take()`` returns, which takes descriptors for another process than the one that has its turn."""
        current, self.current = self.current, None
        try:
            return take()
        finally:
            self.current = current

    def wake(self) -> None:
        for process in self.processes:
            process.idle = False

    def turn(self) -> bool:
        """Gives somebody a turn. Returns False if nobody has anything to do before the time of a timer."""
        chance, clock = self.chance, self.clock
        now_ns = clock.now_ns = clock.now_ns + 500 + int(chance.random() * (_TURN_NS - 500))
        able, sums, total = [], [], 0.0
        for process in self.processes:
            if process.stopped or not process.alive:
                continue
            if process.idle:
                due = process.due_ns()
                if due is None or due > now_ns:
                    continue
            able.append(process)
            total += process.weight
            sums.append(total)
        if not able:
            return False
        if self.uneven and chance.random() < 0.02:
            chance.choice(able).weight = self.weight()
        process = able[0] if len(able) == 1 else able[bisect(sums, chance.random() * total, 0, len(able) - 1)]
        self.run(process)
        return True

    def run(self, process: Process, what: Callable[[], Any] | None = None) -> None:
        """Gives a process its turn, or has it do ``what``."""
        self.current = process
        self.turns += 1
        try:
            if what is not None:
                what()
                did = True
            else:
                did = process.turn()
            if process.dies:
                # A parser in C has made an error of its own of it.
                raise Death
        except Death:
            self.tell(f"{process} dies in the middle of its turn")
            self.cut_short = True
            self.on_death(process)
            did = True
        finally:
            self.current = None
        process.idle = not did
        if did:
            self.wake()

    def next_due_ns(self) -> int | None:
        dues = [process.due_ns() for process in self.processes if process.alive and not process.stopped]
        return min((due for due in dues if due is not None), default=None)

    def pass_time(self, most_ns: int = SECOND) -> None:
        """Lets time pass until something is due, at most ``most_ns``."""
        due = self.next_due_ns()
        until = self.clock.now_ns + most_ns
        self.clock.now_ns = max(self.clock.now_ns, until if due is None else min(due, until))


def eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
