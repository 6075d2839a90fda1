"""Programs that ask over lanes by tensord's own client: their processes, what they ask, and what they may be told."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tensord_client.asynchronous import AsyncModel
from tensord_client.client import Client
from tensord_client.common.connection import Prepared
from tensord_client.common.model import Model
from tensord_client.errors import CLOSED, ResultsHeld, ServingError
from tensord_client.lane import LaneConnection

from tests.simulation.history import Change
from tests.simulation.scheduler import SECOND, Scheduler
from tests.simulation.threads import ClientProcess, Lock, wait

if TYPE_CHECKING:
    from tests.simulation.clients import Ask, Clients

#: How a program waits: in a thread, by a future, by a request that it repeats, or on its event loop.
_WAYS = ("call", "future", "future", "prepared", "await", "await prepared")
#: Of some programs: a lane, on which mostly nobody waits, has no thread of its own then.
_MOSTLY_CALLS = (*["call"] * 9, "future")
#: Seconds that a request waits for a worker that is being replaced.
_PATIENCE = 20.0


class Program(ClientProcess):
    """A program that asks over lanes."""

    def __init__(self, scheduler: Scheduler, name: str, path: str) -> None:
        super().__init__(scheduler, name, path)
        self.client: Client | None = None
        self._connecting = Lock()
        self.models: dict[str, Model] = {}
        #: Requests that are repeated, with their input, and that no thread makes now.
        self.repeated: dict[tuple[str, str, int], tuple[Any, Any]] = {}
        #: Whether it closes its connection now, or has closed it.
        self.leaves = False
        self.ways: Sequence[str] = scheduler.chance.choice((_WAYS, _WAYS, _MOSTLY_CALLS))
        #: True if a question to the daemon has taken too long: the connection goes with it, and the lanes with the connection.
        self.gave_up = False
        #: True if the program has filled its lane once.
        self.fills = False
        #: Answers whose arrays it still reads.
        self.held: list[Any] = []

    @property
    def serves(self) -> bool:
        return self.alive and not self.leaves

    def connected(self) -> Client:
        """Returns its connection to the daemon, which the first call makes."""
        with self._connecting:
            if self.client is None:
                self.connection = LaneConnection(self.path, timeout=60.0, patience=_PATIENCE)
                self.client = Client(self.connection)
            return self.client

    def model(self, name: str) -> Model:
        """Returns a model, once the daemon has described it. Raises ServingError: the daemon's answer."""
        client = self.connected()
        found = self.models.get(name)
        if found is None:
            found = self.models[name] = client.model(name)
        return found

    def prepared(self, way: str, name: str, size: int) -> tuple[Any, Any]:
        """Returns a request that is repeated, and its input."""
        model = self.model(name)
        kept = self.repeated.pop((way, name, size), None)
        if kept is not None:
            return kept
        assert self.connection is not None
        x = self.connection.empty(size, np.int64) if size > 1 else np.zeros(size, np.int64)
        made: Any = model.prepare({"x": x}) if way == "prepared" else self.asynchronous(name).prepare({"x": x})
        return made, x

    def asynchronous(self, name: str) -> AsyncModel:
        model = self.model(name)
        return AsyncModel(model._connection, model._description, 0, None)

    def release(self) -> None:
        self.held.clear()

    def leave(self, waits: Callable[[], bool]) -> None:
        """Ends as a program does that closes its connection first. Every request has its end then: it waits for none any more."""
        self.scheduler.tell(f"{self} leaves")
        self.leaves = True
        self.release()
        self.repeated.clear()
        if self.connection is not None:
            self.connection.close()
        wait(lambda: not waits(), None)
        self.end()

    def bury(self) -> None:
        super().bury()
        self.models.clear()
        self.repeated.clear()
        self.held.clear()
        self.client = None


class LaneClients:
    """All programs that ask over lanes."""

    def __init__(self, scheduler: Scheduler, clients: Clients, path: Path) -> None:
        self.scheduler = scheduler
        self._clients = clients
        self.path = path
        self._started = 0
        self.programs: list[Program] = []

    @property
    def living(self) -> list[Program]:
        return [program for program in self.programs if program.alive and not program.leaves]

    def start(self) -> None:
        self._started += 1
        program = Program(self.scheduler, f"program {self._started}", str(self.path))
        self.programs.append(program)
        self.scheduler.processes.append(program)
        self.scheduler.tell(f"{program} is started")

    def kill(self, program: Program) -> None:
        self.scheduler.tell(f"{program} is killed")
        program.end()
        self._clients.program_ended(program)

    def leave(self, program: Program) -> None:
        """Has a program leave."""
        asks = self._clients.open
        program.call_soon(lambda: program.leave(lambda: any(ask.front is program for ask in asks.values())))

    def end(self) -> None:
        """Ends all programs at once."""
        for program in self.programs:
            program.end()
        self.bury()

    def bury(self) -> None:
        """Frees the dead."""
        for program in [each for each in self.programs if not each.alive]:
            self.programs.remove(program)
            self.scheduler.processes.remove(program)
            program.bury()

    # --------------------------------------------------------------------------------------------------------- requests

    def draw(self, program: Program, chance: random.Random) -> tuple[str, float | None]:
        """Draws the way of a request, and the seconds that it waits."""
        return chance.choice(program.ways), chance.choice((None, None, None, 0.5, 5.0))

    def send(self, ask: Ask) -> None:
        """Sends a request in the way that it says, and takes its end. Runs in a thread of its program."""
        if ask.gone:
            return
        program: Program = ask.front
        try:
            if ask.way == "prepared":
                prepared, x = program.prepared(ask.way, ask.model, ask.size)
                x[:] = ask.input
                answer = self._call(prepared)
                program.repeated.setdefault((ask.way, ask.model, ask.size), (prepared, x))
                self._answered(ask, answer)
                return
            if ask.way.startswith("await"):
                program.model(ask.model)
                program.loop.call_soon_threadsafe(self._begin, ask)
                return
            model = program.model(ask.model)
            model = Model(model._connection, model._description, 0, ask.timeout)
            inputs = {"x": np.full(ask.shape, ask.input, np.int64)}
            if ask.way == "stream":
                with contextlib.closing(model.stream(inputs)) as responses:  # type: ignore[type-var]
                    for response in responses:
                        self._responded(ask, response)
                        self._pause(ask)
                        if ask.gone:
                            return
                self._streamed(ask)
                return
            if ask.way == "call":
                self._answered(ask, model(inputs))
                return
            future = model.submit(inputs)
            ask.request = future
            future.add_done_callback(lambda _: self._ended(ask, future))
            if ask.gone:
                future.cancel()
        except ServingError as error:
            self._failed(ask, error)

    @staticmethod
    def _call(prepared: Prepared) -> Any:
        return prepared()

    def _begin(self, ask: Ask) -> None:
        """Has the program's event loop await a request."""
        if not ask.gone:
            task = ask.request = ask.front.loop.create_task(self._awaited(ask))
            task.add_done_callback(lambda _: self._closed(ask))

    async def _awaited(self, ask: Ask) -> None:
        program: Program = ask.front
        try:
            if ask.way == "await prepared":
                prepared, x = program.prepared(ask.way, ask.model, ask.size)
                x[:] = ask.input
                answer = await prepared()
                program.repeated.setdefault((ask.way, ask.model, ask.size), (prepared, x))
            else:
                model = program.asynchronous(ask.model)
                model.timeout = ask.timeout
                if ask.way == "await stream":
                    stream = model.stream({"x": np.full(ask.shape, ask.input, np.int64)})
                    async with contextlib.aclosing(stream) as responses:  # type: ignore[type-var]
                        async for response in responses:
                            self._responded(ask, response)
                    self._streamed(ask)
                    return
                answer = await model({"x": np.full(ask.shape, ask.input, np.int64)})
        except ServingError as error:
            self._failed(ask, error)
        else:
            self._answered(ask, answer)

    def _pause(self, ask: Ask) -> None:
        """Has a program do something else between two responses, now and then."""
        chance = self.scheduler.chance
        if chance.random() < 0.1:
            time.sleep(chance.choice((0.0001, 0.001, 0.1, 3.0)))

    def _responded(self, ask: Ask, answer: Any) -> None:
        if self.scheduler.chance.random() < 0.3:
            ask.front.held.append(answer)
        if self._awaits(ask):
            self._clients.judge_response(ask, [np.array(answer[name]) for name in ask.outputs])

    def _streamed(self, ask: Ask) -> None:
        if self._awaits(ask):
            self._clients.judge_end(ask)

    def _ended(self, ask: Ask, future: Any) -> None:
        if future.cancelled():
            self._closed(ask)
            return
        error = future.exception()
        if error is None:
            self._answered(ask, future.result())
        else:
            self._failed(ask, error)

    def _answered(self, ask: Ask, answer: Any) -> None:
        outputs = [np.array(answer[name]) for name in ask.outputs]
        ask.front.held.append(answer)
        if self._awaits(ask):
            self._clients.judge(ask, [values.reshape(-1) for values in outputs])

    def _failed(self, ask: Ask, error: BaseException) -> None:
        if not self._awaits(ask):
            return
        if not isinstance(error, ServingError):
            self.scheduler.defect(f"{ask} failed with {error!r}")
        else:
            self._clients.judge_error(ask, error.code, error.message)

    def _awaits(self, ask: Ask) -> bool:
        """Returns whether somebody awaits an end of a request."""
        if ask.outcome and not ask.gone and ask.front.alive and ask.way[:5] != "await":
            self.scheduler.defect(f"{ask} got another end, after: {ask.outcome}")
        return ask.front.alive and not ask.outcome

    def _closed(self, ask: Ask) -> None:
        if self._awaits(ask):
            self.scheduler.defect(f"{ask} was cancelled, and not by its program")

    def cancel(self, ask: Ask) -> None:
        """Cancels a request that was sent. Runs in a thread of its program."""
        request = ask.request
        if isinstance(request, asyncio.Task):
            ask.front.loop.call_soon_threadsafe(request.cancel)
        elif request is not None:
            request.cancel()

    def excuse(self, ask: Ask, code: str, message: str, deaths: int, troubled: bool) -> str:
        """Returns what a request over a lane may have failed of; "": nothing."""
        history = self._clients.history
        # A program may send to a worker that has died just before. One that cannot map a segment ends the lane.
        died = deaths > ask.deaths or history.deaths[-1:] > [ask.begun_ns - SECOND] or history.lacked(ask.begun_ns)
        waited = self.scheduler.clock.now_ns - ask.begun_ns
        ask.front.gave_up |= "does not answer: Connection timed out" in message
        died |= ask.front.gave_up
        if code == "UNAVAILABLE" and troubled and not (ask.waits and waited < _PATIENCE * SECOND * 0.9):
            return "a worker was missing"
        if code == "INTERNAL" and died and ("may not be run twice" in message or "was given up" in message):
            why = (
                "its worker has died, or its lane has ended: for want of a descriptor, or with the program's connection"
            )
            # Workers that end with their daemon are one end: who asks again waits for the next daemon.
            lanes_end = ask.front.gave_up or history.lacked(ask.begun_ns)
            once = sum(end_ns >= ask.begun_ns - SECOND for end_ns in history.ends) < 2
            return "" if once and "was given up" in message and not lanes_end else why
        if code == ResultsHeld.code or "no room for an answer" in message:
            return "its program has held answers"
        if ask.front.fills and "segments of" in message and "bytes are used" in message:
            return "its program's memory is full"
        if ask.front.leaves and message == CLOSED:
            return "its program leaves"
        return ""

    # ---------------------------------------------------------------------------------------------------------- changes

    def push(self, change: Change) -> str:
        """Pushes over the clients' socket. Runs in a thread of the program. Returns the error; "": none."""
        program: Program = change.front
        try:
            connection = program.connected()._connection
            connection.parameters(change.model, 0).update({"k": np.int32(change.number)}, move_sequences=change.moves)
        except ServingError as error:
            return error.message or "?"
        return ""
