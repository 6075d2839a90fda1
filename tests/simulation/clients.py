"""The clients of a simulated daemon: what they ask and change, and whether what they are told can be right."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulation import callers, ensembles, region_clients, regions, rounds, sequences, streamed
from tests.simulation.daemon import Daemon
from tests.simulation.history import Change, History
from tests.simulation.lane_clients import LaneClients, Program
from tests.simulation.network import Connection, Item, Network
from tests.simulation.processes import FrontProcess, WorkerProcess
from tests.simulation.scheduler import SECOND
from tests.simulation.sequences import Sequences, Step

#: An answer is x * OF_X + (number of the files) * OF_FILES + (number of the push).
OF_X, OF_FILES = 1_000_000_000, 10_000
#: The most values of a request that gets several responses.
_MOST_OF_SEVERAL = 1000
#: The most bytes of a request over a socket.
MOST_BODY = 1 << 16
#: How long a request waits for a worker, in seconds.
WORKER_WAIT = 5.0
#: How long it waits for room in the arena, in seconds; and what it is told if none came.
_ROOM_WAIT = 5.0
_NO_ROOM = ("nothing was given back", "none came free", "that did not change", "none ended")
#: A client that lets the daemon wait for so long for the rest of a request is slow, in ns.
_SLOW_NS = 19 * SECOND // 10
#: Nothing that a client waits for takes longer, in ns of the simulated clock.
PATIENCE_NS = 400 * SECOND


@dataclass(eq=False)
class Ask:
    """A client's request."""

    number: int
    model: str
    #: The front that is asked, or the program that asks over lanes.
    front: Any
    begun_ns: int
    size: int
    outcome: str = ""
    #: Its client has gone.
    gone: bool = False
    #: The workers that had died before.
    deaths: int = 0
    #: True if the request kills each worker that runs it, and how many workers it has killed.
    deadly: bool = False
    kills: int = 0
    #: The step of a sequence that this request is, if it is one.
    step: Step | None = None
    #: The value that it asks with, in place of its number, if other requests ask with the same value. 0: its number.
    x: int = 0
    #: The connection over which a front is asked, and when all of the request had left. 0: it has not.
    connection: Connection | None = None
    sent_ns: int = 0
    #: The seconds after which its client gives the request up; None: never.
    timeout: float | None = None
    #: Over a lane: how its program waits.
    way: str = ""
    #: Over HTTP: the endpoint that it is sent to.
    endpoint: str = ""
    #: What the daemon says is wrong with the request; "": nothing is.
    wrong: str = ""
    #: Over a lane: its program knows the model, and so waits for a worker, or a daemon, that is being replaced.
    waits: bool = False
    #: Over gRPC: it wants a mark behind its last response.
    marked: bool = False
    #: How many responses the request has got, and of which files and push they are, where it may get several.
    got: int = 0
    made: tuple[int, int] = (0, 0)
    #: For an ensemble: the number of the model files that its last step answered with; -1: no response has come.
    last_files: int = -1
    request: Any = None
    #: Which of its tensors lie in regions; None: none.
    use: regions.Use | None = None

    @property
    def input(self) -> int:
        return self.x or self.number

    @property
    def shape(self) -> list[int]:
        return [1, self.size] if self.model in (sequences.MODEL, rounds.MODEL, regions.MODEL) else [self.size]

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.model in callers.MODELS:
            return "y", "calls"
        return {
            ensembles.MODEL: ("first", "y"),
            regions.MODEL: ("y", "w"),
            streamed.MODEL: ("y", "at"),
            streamed.LATER: ("y", "at"),
            streamed.FLOW: ("first", "y", "at"),
        }.get(self.model, ("y",))

    def __str__(self) -> str:
        return f"ask {self.number} of '{self.model}'"


class Clients:
    """All clients of a daemon."""

    def __init__(self, daemon: Daemon, history: History, path: Path, kinds: dict[str, type[Connection]]) -> None:
        self.daemon = daemon
        self.scheduler = daemon.scheduler
        self.history = history
        self.asks: dict[int, Ask] = {}
        self.open: dict[int, Ask] = {}
        self.counts: Counter[str] = Counter()
        self._sequences = Sequences(history)
        self.lanes = LaneClients(daemon.scheduler, self, path)
        self.network = Network(self, kinds)
        self.regions = region_clients.RegionClients(self)
        #: How often a worker has run a request, by its number.
        self.runs: Counter[int] = Counter()
        #: From then on nothing happens, and nothing is left of what has happened.
        self.calm_ns = 1 << 62
        #: When the daemon was told to stop; 0: it was not.
        self.stopped_ns = 0
        #: What was in flight when the time for a stop was over is cut.
        self.cut = False

    # --------------------------------------------------------------------------------------------------------- requests

    def ask(
        self, front: FrontProcess, model: str, size: int, deadly: bool = False, places: random.Random | None = None
    ) -> None:
        self.ask_over(self.network.route(front), model, size, deadly, places)

    def ask_over(
        self,
        connection: Connection,
        model: str,
        size: int,
        deadly: bool = False,
        places: random.Random | None = None,
    ) -> None:
        """Asks over a connection. ``places``: draws which tensors lie in regions; None: none does."""
        size = min(size, 1 if model == rounds.MODEL else _MOST_OF_SEVERAL if model in streamed.SEVERAL else size)
        ask = Ask(len(self.asks) + 1, model, connection.front, self.scheduler.clock.now_ns, size, deadly=deadly)
        ask.connection = connection
        self._begin(ask, "deadly" if deadly else f"{size * 8} bytes", places)

    @property
    def waits(self) -> bool:
        """Returns whether somebody waits who has asked a front."""
        return any(ask.connection is not None for ask in self.open.values())

    def ask_over_lane(self, program: Program, model: str, size: int, chance: random.Random, way: str = "") -> None:
        ask = Ask(len(self.asks) + 1, model, program, self.scheduler.clock.now_ns, size)
        drawn, ask.timeout = self.lanes.draw(program, chance)
        if model in streamed.SEVERAL:
            ask.size = min(size, _MOST_OF_SEVERAL)
            drawn = way = chance.choice(("stream", "await stream"))
        elif model == rounds.MODEL:
            # Who waits in a thread cannot take it back.
            ask.size, drawn = 1, "await" if drawn.startswith("await") else "future"
        ask.way, ask.waits = way or drawn, model in program.models
        self._begin(ask, f"{ask.way}, {size * 8} bytes{'' if ask.timeout is None else f', for {ask.timeout} s'}")

    def step(self, fronts: list[FrontProcess], chance: random.Random | None = None) -> bool:
        """Has the client of a sequence send its next step, or, without ``chance``, its last. Returns whether there is one."""
        number, now_ns = len(self.asks) + 1, self.scheduler.clock.now_ns
        known = self._sequences

        def route() -> Connection:
            return self.network.route((chance or self.scheduler.chance).choice(fronts))

        drawn = known.next(route, number, now_ns, chance) if chance else known.last(route)
        if drawn is None:
            return False
        connection, step = drawn
        what = f"sequence {step.run.number}{' START' * step.start}{' END' * step.end}"
        ask = Ask(number, sequences.MODEL, connection.front, now_ns, 1, step=step, connection=connection)
        self._begin(ask, what)
        return True

    def _begin(self, ask: Ask, what: str, places: random.Random | None = None) -> None:
        ask.deaths = len(self.history.deaths)
        if ask.model == ensembles.MODEL:
            ask.x = 1 + ask.number % 3
        elif ask.model == rounds.MODEL and ask.way:
            # A request over a lane has no id: nobody would know when its client is to leave.
            ask.x = rounds.with_end(ask.number)
        self.asks[ask.number] = self.open[ask.number] = ask
        if places is not None:
            self.regions.place(ask, places)
            what = f"{ask.size * 8} bytes{ask.use}"
        self.scheduler.tell(f"{ask} ({what}) at {ask.front if ask.connection is None else ask.connection}")
        if ask.connection is None:
            ask.front.call_soon(lambda: self.lanes.send(ask))
        else:
            ask.connection.queue(ask)

    def cancel(self, ask: Ask) -> None:
        connection = ask.connection
        if connection is not None and connection.private:
            return
        self.scheduler.tell(f"the client of {ask} goes")
        ask.gone = True
        self._close(ask, "cancelled")
        if connection is None:
            ask.front.call_soon(lambda: self.lanes.cancel(ask))
        elif ask not in connection.waiting and not connection.leave(ask):
            connection.cut = True
            connection.client.busy[connection] = None
            connection.client.idle = False

    def _close(self, ask: Ask, outcome: str) -> None:
        self.open.pop(ask.number, None)
        ask.outcome, ask.request = outcome, ask.request if ask.gone else None
        kind = outcome.split(":")[0]
        self.counts[kind] += 1
        if ask.step is not None:
            self._sequences.closed(ask.step, kind)
        if ask.use is not None:
            self.regions.closed(ask, kind)

    def release(self) -> None:
        """Has programs finish reading answers."""
        for program in self.lanes.living:
            program.call_soon(program.release)

    def program_ended(self, program: Program) -> None:
        for ask in [ask for ask in self.open.values() if ask.front is program]:
            self._close(ask, "its program has died")

    def ran(self, ask_number: str) -> None:
        """Notes that a worker runs the request with that id."""
        number = int(ask_number or 0)
        self.runs[number] += 1
        known = self.asks.get(number)
        if known is not None and known.step is not None:
            known.step.run.ran_ns = self.scheduler.clock.now_ns
        ask = self.open.get(number)
        if number in self.asks:
            self.regions.ran(self.asks[number])
        if ask is not None and ask.model == rounds.MODEL and rounds.leaves(ask.input, self.runs[number]):
            self.cancel(ask)

    # ------------------------------------------------------------------------------------------- what connections report

    def goes_on(self, item: Item) -> bool:
        """Returns whether a request is still to be sent."""
        if isinstance(item, Change):
            return bool(item.front.alive)
        if item.step is not None and item.gone:
            item.step.run.cut = True
        elif item.step is not None and item.step.run.cut and not item.outcome:
            self._close(item, "cancelled")
        return not item.outcome

    def cancelled(self, item: Item) -> None:
        """Notes that the client of a request has cancelled the call that it belongs to."""
        if isinstance(item, Ask) and not item.outcome:
            item.gone = True
            self._close(item, "cancelled")

    def left(self, item: Item) -> None:
        """Notes that a connection is closed over which a request was sent, because of its client."""
        if isinstance(item, regions.Call):
            self.regions.lost(item)
        elif isinstance(item, Change):
            item.lost = True
        elif not item.outcome:
            self._close(item, "cut by its client")

    def front_died(self, item: Item) -> None:
        """Notes that the front of a request has died."""
        if isinstance(item, Ask) and not item.outcome:
            self._close(item, "its front has died")

    def not_taken(self, item: Item, why: str) -> None:
        """Asks once more what the daemon has said, or shown, that it has not taken; checks that it has not."""
        if isinstance(item, Ask):
            if item.outcome:
                return
            if self.runs[item.number]:
                self.scheduler.defect(f"{item} was not taken, and a worker has run it: {why}")
        self.scheduler.tell(f"{item} was not taken: {why}")
        self.ask_again(item)

    def ask_again(self, item: Item) -> None:
        """Has a request that was not taken sent over another connection."""
        if not self.goes_on(item):
            return
        fronts = [
            front
            for front in self.daemon.children(FrontProcess)
            if front.serves and (isinstance(item, Ask) or front.protocol == "http" or item.kind != "push")
        ]
        if not fronts or (isinstance(item, Ask) and item.step is not None and item.front.protocol == "grpc"):
            if isinstance(item, Ask):
                self._close(item, "was not taken")
            else:
                self.change_ended(item, "its front has stopped")
            return
        front = self.scheduler.chance.choice(fronts)
        if isinstance(item, Change):
            connection = self.network.route(front, private=True)
        elif item.step is None:
            connection = item.connection = self.network.route(front)
        else:
            sequence = item.step.sequence
            if not sequence.route.usable:
                sequence.former, sequence.route = sequence.route, self.network.route(front)
            connection = item.connection = sequence.route
        item.front, item.sent_ns = connection.front, 0
        if isinstance(item, regions.Call):
            item.connection = connection
        if isinstance(item, Ask):
            # How it was asked before says nothing of how it will be.
            item.endpoint, item.wrong, item.timeout, item.marked, item.got = "", "", None, False, 0
        self.scheduler.tell(f"{item} is asked again at {connection}")
        connection.queue(item)

    def is_deadly(self, ask_number: str) -> bool:
        """Returns whether the request with that id kills the worker that runs it; counts that it does."""
        ask = self.asks.get(int(ask_number or 0))
        if ask is None or not ask.deadly:
            return False
        ask.kills += 1
        if ask.kills > 2:
            self.scheduler.defect(f"{ask} has killed {ask.kills} workers")
        return True

    def dies_of(self, model: str, push: int, worker: WorkerProcess) -> bool:
        """Returns whether a worker dies of staging a push; checks that it was not given one that another has died of before."""
        found = next(
            (each for each in self.history.changes[model] if each.kind == "push" and each.number == push), None
        )
        if found is not None and found.is_gone(worker.started_ns):
            self.scheduler.defect(f"{found}, of a daemon that has ended, is given to {worker} of the next one")
        if found is None or not found.deadly:
            return False
        if found.killed_ns and worker.started_ns > found.killed_ns:
            self.scheduler.defect(f"{found}, of which a worker has died, is given to the next one")
        found.killed_ns = found.killed_ns or self.scheduler.clock.now_ns
        return True

    # ---------------------------------------------------------------------------------------------------------- answers

    def judge(self, ask: Ask, outputs: Sequence[Any]) -> None:
        """Judges an answer that is no error."""
        if self._is_second(ask):
            return
        if ask.use is not None and not self.regions.judge(ask):
            self._close(ask, "answered")
        elif ask.model == rounds.MODEL:
            self._judge_rounds(ask, outputs[0].tolist())
        elif ask.step is None:
            self.judge_values(ask, outputs)
        else:
            self._judge_step(ask, ask.step, outputs[0].tolist())

    def _is_second(self, ask: Ask) -> bool:
        if ask.outcome and not ask.gone:
            self.scheduler.defect(f"{ask} got another end, after: {ask.outcome}")
        return bool(ask.outcome)

    def judge_response(self, ask: Ask, outputs: Sequence[Any]) -> None:
        """Judges a response of several: its output, and which one it is."""
        if self._is_second(ask) or not self._is_whole(ask, outputs[:-1]):
            return
        *made_by, at = outputs
        if at.tolist() != [ask.got]:
            self.scheduler.defect(f"{ask} got response {at} where {ask.got} was next")
        value = int(made_by[0][0])
        if ask.model == streamed.FLOW:
            value, last = ensembles.steps_of(made_by[0], made_by[1], OF_X)
            x, rest = divmod(last, OF_X)
            self.judge_made(ask, streamed.STEPS[1], x, *divmod(rest, OF_FILES))
            if ask.last_files not in (-1, rest // OF_FILES):
                self.scheduler.defect(
                    f"{ask} got response {at} of load {rest // OF_FILES}, and others of {ask.last_files}"
                )
            ask.last_files = rest // OF_FILES
        x, rest = divmod(value, OF_X)
        made = divmod(rest, OF_FILES)
        if not ask.got:
            self.judge_made(ask, streamed.MODEL if ask.model == streamed.FLOW else ask.model, x, *made)
        elif x != ask.input or made != ask.made:
            self.scheduler.defect(f"{ask} got response {at} of {x} by {made}, and the first by {ask.made}")
        ask.got, ask.made = ask.got + 1, made
        if streamed.leaves(x, ask.got):
            self.cancel(ask)

    def judge_end(self, ask: Ask) -> None:
        """Judges that no further response follows."""
        if self._is_second(ask):
            return
        if ask.got != streamed.count(ask.input) or streamed.fails(ask.input):
            self.scheduler.defect(f"{ask} has ended after {ask.got} responses")
        self._close(ask, "answered")

    def judge_lost_end(self, ask: Ask) -> None:
        """Judges that the worker of a request has died behind its last response, and before it has said that it was the last."""
        if len(self.history.deaths) <= ask.deaths:
            self.scheduler.defect(f"{ask} has lost its end, and no worker has died")

    def judge_values(self, ask: Ask, outputs: Sequence[Any]) -> None:
        """Judges an answer that is no error: its outputs, of an ensemble those of both steps."""
        if ask.model in streamed.SEVERAL:
            if ask.wrong == streamed.REFUSED and streamed.is_one(ask.model, ask.input):
                ask.wrong = ""  # until its front knows of the load, nothing shows that there might have been more
            self.judge_response(ask, outputs)
            self.judge_end(ask)
            return
        if not self._is_whole(ask, outputs[:1] if ask.model in callers.MODELS else outputs):
            return
        if ask.model in callers.MODELS:
            callers.judge(self, ask, outputs, OF_X, OF_FILES)
            self._close(ask, "answered")
            return
        if ask.model == ensembles.MODEL:
            each = zip(ensembles.STEPS, ensembles.steps_of(outputs[0], outputs[1], OF_X), strict=True)
        elif ask.model == regions.MODEL:
            each = zip((ask.model,) * 2, (int(outputs[0][0]), int(outputs[1][0])), strict=True)
            if outputs[0][0] != outputs[1][0]:
                self.scheduler.defect(f"{ask} got outputs of two runs: {outputs}")
        else:
            each = zip((ask.model,), (int(outputs[0][0]),), strict=True)
        for model, value in each:
            x, rest = divmod(value, OF_X)
            self.judge_made(ask, model, x, *divmod(rest, OF_FILES))
        self._close(ask, "answered")

    def _is_whole(self, ask: Ask, outputs: Sequence[Any]) -> bool:
        if ask.wrong:
            self.scheduler.defect(f"{ask} is answered, and was wrong: {ask.wrong}")
        wrong = [values for values in outputs if len(values) != ask.size or (values != values[0]).any()]
        if wrong:
            self.scheduler.defect(f"{ask} got other values than it asked for: {wrong}")
        return not (wrong or ask.wrong)

    def judge_made(self, ask: Ask, model: str, x: int, files: int, push: int) -> None:
        """Judges which files and which push of a model have made an answer, or a part of it, to which input."""
        self._judge_files(ask, model, x, files)
        if why := self.history.why_not_push(model, push, ask.begun_ns):
            self.scheduler.defect(f"{ask} got an answer of push {push} of '{model}': {why}")
        self.scheduler.tell(f"{ask} is answered by load {files}, push {push}")

    def _judge_files(self, ask: Ask, model: str, x: int, files: int) -> None:
        history, defect = self.history, self.scheduler.defect
        if x != ask.input:
            defect(f"{ask} got the answer of {x}")
        # A sequence ends on the load where it began.
        least = 0 if ask.step and not ask.step.start else history.least_files(model, ask.begun_ns)
        if not least <= files <= history.files[model]:
            defect(
                f"{ask} got an answer of load {files} of '{model}'; load {least} had been answered before it was asked"
            )
        if history.is_down(model, ask.begun_ns):
            defect(f"{ask} got an answer although '{model}' had been unloaded before it was asked")

    def _judge_step(self, ask: Ask, step: Step, values: list[int]) -> None:
        x, _, steps, files, push = values
        self._judge_files(ask, ask.model, x, files)
        if why := self._sequences.why_not(step, ask.begun_ns, self.scheduler.clock.now_ns, values):
            self.scheduler.defect(f"{ask} of sequence {step.run.number} got a wrong answer: {why}")
        self.scheduler.tell(f"{ask} is answered as step {steps} by load {files}, push {push}")
        self._close(ask, "answered")

    def _judge_rounds(self, ask: Ask, values: list[int]) -> None:
        self._judge_files(ask, ask.model, values[0], values[3])
        if why := rounds.why_not(ask.input, values):
            self.scheduler.defect(f"{ask} got a wrong answer: {why}")
        self.scheduler.tell(f"{ask} is answered after {values[1]} rounds by load {values[3]}")
        self._close(ask, "answered")

    def _was_troubled(self, ask: Ask) -> bool:
        """Returns whether a worker was missing, or somebody did not run, for some of the time in which the request waited."""
        since_ns = ask.begun_ns - int(WORKER_WAIT * SECOND)
        return (
            any(at >= since_ns for at in (*self.history.deaths[-1:], self.history.trouble_ns))
            or any(process.stopped for process in self.scheduler.processes)
            or self.history.lacked(since_ns)
        )

    def _is_up(self, ask: Ask) -> bool:
        """Returns whether the model, and each that it needs, must have been loaded when it was asked."""
        return all(self.history.is_up(model, ask.begun_ns) for model in self._used(ask))

    def _comes_later(self, ask: Ask) -> bool:
        """Returns whether it was asked for an ensemble that had gone with a model, while that was loaded again and again.

        The ensemble is loaded when none is.
        """
        changes = [change for each in ensembles.ALL.get(ask.model, ()) for change in self.history.changes[each]]
        loads = any(change.kind == "load" and change.may_last(ask.begun_ns) for change in changes)
        return loads and any(change.kind == "unload" for change in changes)

    @staticmethod
    def _used(ask: Ask) -> tuple[str, ...]:
        """Returns the models that a request uses."""
        if ask.model in ensembles.ALL:
            return (*ensembles.ALL[ask.model], ask.model)
        return callers.needed(ask.model, ask.input) if ask.model in callers.MODELS else (ask.model,)

    def judge_error(self, ask: Ask, code: str, message: str) -> None:
        """Judges an error. ``code``: "" where the protocol does not tell it."""
        if self._is_second(ask):
            return
        message = message.replace(f"{self.lanes.path.parent}/", "")
        self.scheduler.tell(f"{ask} is answered: {code}: {message}")
        deaths = len(self.history.deaths)
        waited = self.scheduler.clock.now_ns - ask.begun_ns
        unavailable, not_found, internal = (code in ("", each) for each in ("UNAVAILABLE", "NOT_FOUND", "INTERNAL"))
        # A front of the daemon before goes on for a moment.
        known_ns = ask.begun_ns if ask.way else min(ask.begun_ns, ask.front.started_ns)
        unknown = not_found and not all(self.history.is_coming(model, known_ns) for model in self._used(ask))
        excused = (
            ((unavailable or unknown) and not self._is_up(ask))
            or (
                unavailable
                and ("within" in message or "is still being loaded" in message)
                and waited >= WORKER_WAIT * SECOND * 0.9
                and self._was_troubled(ask)
            )
            or (unavailable and "cannot be served now" in message and deaths >= 2)
            or (unavailable and message.endswith("it is being loaded") and self._comes_later(ask))
            # Two workers may be killed while they are given a set of parameters again, and nothing else: it is blamed for that.
            or (not_found and "died of it" in message and deaths >= 2)
            or (not_found and ask.model in ensembles.ALL and bool(self.history.blamed) and deaths >= 2)
            or (internal and "was given up" in message and not ask.way and deaths - ask.deaths >= 2)
            or (unavailable and "is draining" in message and self.history.was_drained(ask.begun_ns))
            or (code == "DEADLINE_EXCEEDED" and ask.timeout is not None and waited >= ask.timeout * SECOND)
            or any(said in message and waited >= _ROOM_WAIT * SECOND * 0.9 for said in _NO_ROOM)
            or (unavailable and self.history.lacked_for(message, ask.begun_ns))
            or bool(ask.wrong and ask.wrong in message)
            or (ask.use is not None and self.regions.excuse(ask, code, message))
        )
        if ask.model in callers.MODELS:
            excused |= bool(callers.why_error(self, ask, message))
        if ask.model == rounds.MODEL:
            # A worker that dies has its state.
            excused |= internal and deaths > ask.deaths and "may not be run twice" in message
        if ask.model in streamed.SEVERAL:
            single = ask.endpoint == "generate"
            died = internal and deaths > ask.deaths and "may not be run twice" in message
            # Every worker that had it may have begun it, also one that had died before its front knew.
            fenced = [] if ask.way else [at for at in ask.front.fenced if at >= ask.begun_ns]
            lost = internal and "was given up" in message and len(fenced) >= 2
            excused |= bool(
                streamed.why_error(message, ask.input, ask.got, single) or (died and (ask.got or single)) or lost
            )
        if ask.way:
            troubled = ask.begun_ns < self.calm_ns or any(at >= self.calm_ns for at in self.history.deaths[-1:])
            excused = excused or bool(self.stopped_ns or self.lanes.excuse(ask, code, message, deaths, troubled))
        if ask.step is not None:
            excused |= bool(self._sequences.excuse(ask.step, self.scheduler.clock.now_ns, code, message))
        if not excused:
            self.scheduler.defect(f"{ask} failed without a reason: {code}: {message}")
        self._close(ask, f"error: {message}")
        self.counts[f"error {code or 'of a stream'}"] += 1

    def was_slow(self, connection: Connection) -> bool:
        """Returns whether a client has let the daemon wait for the rest of a request."""
        return connection.slowest_ns >= _SLOW_NS

    def late(self, text: str) -> None:
        """Judges that a stop has taken all the time there is.

        A sequence may wait for as long as others keep their slots. While no worker runs, a load waits for one, and those that
        were started do not hear that they are to end.
        """
        changes = [change for each in self.history.changes.values() for change in each]
        loads = any(change.kind == "load" and not (change.ended_ns or change.lost) for change in changes)
        is_worker = text.startswith("supervisor: stopping: worker-")
        without_workers = self.history.trouble_ns > self.scheduler.clock.now_ns
        self.cut = (without_workers and (loads or is_worker)) or any(ask.step is not None for ask in self.open.values())
        if not self.cut:
            self.scheduler.defect(text)

    def check_patience(self) -> None:
        before = self.scheduler.clock.now_ns - PATIENCE_NS
        for ask in self.open.values():
            client = ask.connection and ask.connection.client
            if ask.begun_ns < before and not (ask.front.stopped or (client and client.stopped)):
                self.scheduler.defect(f"{ask} has no end after {PATIENCE_NS // SECOND} s")
            break

    # ---------------------------------------------------------------------------------------------------------- changes

    def change(self, kind: str, front: FrontProcess | Program, model: str, number: int, deadly: bool = False) -> None:
        change = Change(kind, model, number, self.scheduler.clock.now_ns, front, deaths=len(self.history.deaths))
        change.deadly = deadly
        change.moves = kind == "push" and number % 2 == 1
        change.by_program = isinstance(front, Program)
        self.history.changes[model].append(change)
        self.scheduler.tell(f"{'deadly ' * deadly}{change} at {front}")
        if isinstance(front, Program):
            front.call_soon(lambda: self.change_ended(change, self.lanes.push(change)))
        else:
            self.network.route(front, private=True).queue(change)

    def change_ended(self, change: Change, error: str) -> None:
        if isinstance(change, regions.Call):
            self.regions.ended(change, error)
            return
        error = error.replace(f"{self.lanes.path.parent}/", "")
        change.ended_ns = change.ended_ns or self.scheduler.clock.now_ns
        if "has closed the connection" in error and self.history.ended_ns >= change.begun_ns:
            self.scheduler.tell(f"{change} was perhaps done: {error}")
            change.lost, change.gone_ns = True, self.history.ended_ns
            self._ask_next(change)
            return
        change.error = error
        if not error:
            self.history.blamed.discard(change.model)
        self.scheduler.tell(f"{change} is answered: {error or 'done'}")
        if error and not self.stopped_ns:
            if not (self.history.why_failed(change) or self._timed_out(change)):
                self.scheduler.defect(f"{change} failed without a reason: {error}")
            self.counts["failed change"] += 1
        self._ask_next(change)

    def _timed_out(self, change: Change) -> bool:
        """Returns whether its client has waited for all its time, while somebody did not run."""
        troubled = self.history.trouble_ns >= change.begun_ns or any(each.stopped for each in self.scheduler.processes)
        return troubled and str(change.error).endswith("does not answer: timed out")

    def _ask_next(self, change: Change) -> None:
        """Has the client of a change ask the model at once, through every front."""
        fronts = [front for front in self.daemon.children(FrontProcess) if front.serves]
        if self.stopped_ns or not fronts:
            return
        self.scheduler.clock.now_ns += 1
        if change.model == sequences.MODEL:
            self.step(fronts, self.scheduler.chance)
            return
        for front in fronts:
            self.ask(front, change.model, 1)
            if change.model in ensembles.STEPS:
                self.ask(front, ensembles.MODEL, 1)
        for program in self.lanes.living if change.model != regions.MODEL else ():
            self.ask_over_lane(program, change.model, 1, self.scheduler.chance)


def safetensors(number: int) -> bytes:
    head = json.dumps({"k": {"dtype": "I32", "shape": [], "data_offsets": [0, 4]}}).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + struct.pack("<i", number)
