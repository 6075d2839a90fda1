"""The clients of a simulated daemon: what they ask and change, and whether what they are told can be right."""

from __future__ import annotations

import fcntl
import json
import os
import random
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensord.daemon.submit.in_flight import InFlight
from tensord.shm import descriptors
from tensord.shm.arena import Lease
from tensord.shm.errors import ServingError, Unavailable
from tensord.shm.lane import SubmitterLane
from tensord.shm.messages import AnswerRecord, PreparedAnswer, PreparedRequest, PreparedTensor, RequestRecord, Slice
from tensord.shm.operations import MAIN_SET, LoadModel, MemorySource, PushParameters, UnloadModel
from tests.simulation import ensembles, sequences
from tests.simulation.history import Change, History
from tests.simulation.lane_clients import LaneClients, Program
from tests.simulation.processes import Daemon, FrontProcess, WorkerProcess
from tests.simulation.scheduler import SECOND
from tests.simulation.sequences import Sequences, Step

#: An answer is x * OF_X + (number of the files) * OF_FILES + (number of the push).
OF_X, OF_FILES = 1_000_000_000, 10_000
#: How long a request waits for a worker, in seconds.
WORKER_WAIT = 5.0
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
    #: Its client has gone, and its front knows.
    gone: bool = False
    cancelled: bool = False
    #: The workers that had died before.
    deaths: int = 0
    #: Whether it kills the worker that runs it, and how many workers it has killed.
    deadly: bool = False
    kills: int = 0
    #: The step of a sequence that this request is, if it is one.
    step: Step | None = None
    #: The value that it asks with, in place of its number, if other requests ask with the same value. 0: its number.
    x: int = 0
    #: Over a lane: how its program waits, and for how many seconds.
    way: str = ""
    timeout: float | None = None
    request: Any = None

    @property
    def input(self) -> int:
        return self.x or self.number

    def __str__(self) -> str:
        return f"ask {self.number} of '{self.model}'"


class ClientRequest(InFlight):
    ask: Ask
    clients: Any

    def completed(self, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        self.clients.answered(self.ask, prepared, record, lane)

    def undelivered(self) -> None:
        self.clients.scheduler.defect(f"{self.ask}: its answer could not be delivered")


class Clients:
    """All clients of a daemon."""

    def __init__(self, daemon: Daemon, history: History, path: Path) -> None:
        self.daemon = daemon
        self.scheduler = daemon.scheduler
        self.history = history
        self.asks: dict[int, Ask] = {}
        self.open: dict[int, Ask] = {}
        #: Answers whose memory a client still reads.
        self.held: list[tuple[FrontProcess, SubmitterLane, Any]] = []
        self.counts: Counter[str] = Counter()
        self._sequences = Sequences(history)
        self.lanes = LaneClients(daemon.scheduler, self, path)
        #: From then on nothing happens, and nothing is left of what has happened.
        self.calm_ns = 1 << 62
        #: The daemon is being stopped, and may refuse anything.
        self.refused = False

    # --------------------------------------------------------------------------------------------------------- requests

    def ask(self, front: FrontProcess, model: str, size: int, deadly: bool = False) -> None:
        what = "deadly" if deadly else f"{size * 8} bytes"
        self._begin(Ask(len(self.asks) + 1, model, front, self.scheduler.clock.now_ns, size, deadly=deadly), what)

    def ask_over_lane(self, program: Program, model: str, size: int, chance: random.Random, way: str = "") -> None:
        ask = Ask(len(self.asks) + 1, model, program, self.scheduler.clock.now_ns, size)
        drawn, ask.timeout = self.lanes.draw(program, chance)
        ask.way = way or drawn
        self._begin(ask, f"{ask.way}, {size * 8} bytes{'' if ask.timeout is None else f', for {ask.timeout} s'}")

    def step(self, fronts: list[FrontProcess], chance: random.Random | None = None) -> bool:
        """Has the client of a sequence send its next step, or, without ``chance``, its last. Returns whether there is one."""
        number, now_ns = len(self.asks) + 1, self.scheduler.clock.now_ns
        known = self._sequences
        drawn = known.next(fronts, number, now_ns, chance) if chance else known.last(fronts, number, now_ns)
        if drawn is None:
            return False
        front, step = drawn
        what = f"sequence {step.run.number}{' START' * step.start}{' END' * step.end}"
        self._begin(Ask(number, sequences.MODEL, front, now_ns, 1, step=step), what)
        return True

    def _begin(self, ask: Ask, what: str) -> None:
        ask.deaths = len(self.history.deaths)
        ask.x = 1 + ask.number % 3 if ask.model == ensembles.MODEL else 0
        self.asks[ask.number] = self.open[ask.number] = ask
        self.scheduler.tell(f"{ask} ({what}) at {ask.front}")
        ask.front.call_soon(lambda: self.lanes.send(ask) if ask.way else self._send(ask))

    def _send(self, ask: Ask) -> None:
        if ask.gone:
            if ask.step is not None:
                ask.step.run.cut = True
            return
        if ask.step is not None and ask.step.run.cut:
            self._close(ask, "cancelled")
            return
        if not ask.front.serves:
            self._close(ask, "its front has stopped")
            return
        assert ask.front.front is not None
        submitter = ask.front.front.submitter
        lease: Lease | None = None
        try:
            state = ask.front.front.table.expect(ask.model)
            array = np.full((1, 1) if ask.step else ask.size, ask.input, np.int64)
            prepared = PreparedRequest(ask.model, 0, (PreparedTensor("x", "INT64", array.shape),))
            if array.nbytes > submitter.inline_byte_size:
                lease = submitter.loan(array.nbytes)
                if lease is None:
                    self._close(ask, "there was no room")
                    return
                lease.view[: array.nbytes] = array.view(np.uint8).data
                content: Any = lease.place
            else:
                content = array.tobytes()
            numbered = submitter.numbers.number(prepared) if ask.number % 2 else None
            record = RequestRecord(
                submitter.next_id(),
                numbered.number if numbered else prepared,
                (content,),
                str(ask.number),
                received_ns=ask.begun_ns,
                sequence_id=ask.step.run.number if ask.step else 0,
                sequence_start=ask.step is not None and ask.step.start,
                sequence_end=ask.step is not None and ask.step.end,
            )
            leases = () if lease is None else (lease,)
            ask.request = ClientRequest(ask=ask, clients=self, record=record, numbered=numbered, leases=leases)
            submitter.send(ask.request, state)
        except ServingError as error:
            self.judge_error(ask, error.code, error.message)

    def cancel(self, ask: Ask) -> None:
        self.scheduler.tell(f"the client of {ask} goes")
        ask.gone = True
        self._close(ask, "cancelled")

        def cancel() -> None:
            ask.cancelled = True
            if ask.way:
                self.lanes.cancel(ask)
            elif ask.request is not None and ask.front.serves:
                ask.front.front.submitter.cancel(ask.request)

        ask.front.call_soon(cancel)

    def _close(self, ask: Ask, outcome: str) -> None:
        self.open.pop(ask.number, None)
        ask.outcome, ask.request = outcome, ask.request if ask.gone else None
        kind = outcome.split(":")[0]
        self.counts[kind] += 1
        if ask.step is not None:
            self._sequences.closed(ask.step, kind)

    def release(self) -> None:
        """Has clients finish reading answers."""
        held, self.held = self.held, []
        for front, lane, lease in held:

            def release(front: FrontProcess = front, lane: SubmitterLane = lane, lease: Any = lease) -> None:
                front.front.submitter.release(lane, lease)  # type: ignore[union-attr]

            if front.alive:
                front.call_soon(release)
        for program in self.lanes.living:
            program.call_soon(program.release)

    def front_ended(self, front: FrontProcess | Program) -> None:
        for ask in [ask for ask in self.open.values() if ask.front is front]:
            self._close(ask, "its front has died")
        self.held = [each for each in self.held if each[0] is not front]

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
        if found is None or not found.deadly:
            return False
        if found.killed_ns and worker.started_ns > found.killed_ns:
            self.scheduler.defect(f"{found}, of which a worker has died, is given to the next one")
        found.killed_ns = found.killed_ns or self.scheduler.clock.now_ns
        return True

    # ---------------------------------------------------------------------------------------------------------- answers

    def answered(self, ask: Ask, prepared: PreparedAnswer, record: AnswerRecord, lane: SubmitterLane | None) -> None:
        """Takes an answer of a front to a client, and judges it."""
        if not prepared.final:
            self.scheduler.defect(f"{ask} got an answer that is not its last")
        if ask.gone and not ask.cancelled:
            if record.lease is not None and lane is not None:
                self.held.append((ask.front, lane, record.lease))
            return
        if ask.outcome:
            self.scheduler.defect(f"{ask} got another end, after: {ask.outcome}")
            return
        value: bytes | memoryview = b""
        if not record.code:
            found = []
            for content in record.contents:
                value = lane.view(content) if isinstance(content, Slice) and lane is not None else content  # type: ignore[assignment]
                found.append(np.frombuffer(bytes(value), np.int64))
            if ask.step is None:
                self.judge_values(ask, found)
            else:
                self._judge_step(ask, ask.step, found[0].tolist())
        else:
            self.judge_error(ask, record.code, record.message)
        if record.lease is not None:
            assert lane is not None
            self.held.append((ask.front, lane, record.lease))

    def judge_values(self, ask: Ask, outputs: Sequence[Any]) -> None:
        """Judges an answer that is no error: its outputs, of an ensemble those of both steps."""
        for values in outputs:
            if len(values) != ask.size or (values != values[0]).any():
                self.scheduler.defect(f"{ask} got other values than it asked for: {values}")
        if ask.model == ensembles.MODEL:
            each = zip(ensembles.STEPS, ensembles.steps_of(*outputs, OF_X), strict=True)
        else:
            each = zip((ask.model,), (int(outputs[0][0]),), strict=True)
        for model, value in each:
            x, rest = divmod(value, OF_X)
            files, push = divmod(rest, OF_FILES)
            self._judge_files(ask, model, x, files)
            if why := self.history.why_not_push(model, push, ask.begun_ns):
                self.scheduler.defect(f"{ask} got an answer of push {push} of '{model}': {why}")
            self.scheduler.tell(f"{ask} is answered by load {files}, push {push}")
        self._close(ask, "answered")

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

    def _was_troubled(self, ask: Ask) -> bool:
        """Returns whether a worker was missing, or somebody did not run, for some of the time in which the request waited."""
        since_ns = ask.begun_ns - int(WORKER_WAIT * SECOND)
        return (
            any(at >= since_ns for at in (*self.history.deaths[-1:], self.history.trouble_ns))
            or any(process.stopped for process in self.scheduler.processes)
            or self.history.lacked(since_ns)
        )

    def _is_up(self, ask: Ask) -> bool:
        """Returns whether the model, or each of an ensemble's, must have been loaded when it was asked."""
        models = ensembles.STEPS if ask.model == ensembles.MODEL else (ask.model,)
        return all(self.history.is_up(model, ask.begun_ns) for model in models)

    def judge_error(self, ask: Ask, code: str, message: str) -> None:
        message = message.replace(f"{self.lanes.path.parent}/", "")
        self.scheduler.tell(f"{ask} is answered: {code}: {message}")
        deaths = len(self.history.deaths)
        waited = self.scheduler.clock.now_ns - ask.begun_ns
        excused = (
            (code in ("NOT_FOUND", "UNAVAILABLE") and not self._is_up(ask))
            or (code == "UNAVAILABLE" and waited >= WORKER_WAIT * SECOND * 0.9 and self._was_troubled(ask))
            or (code == "UNAVAILABLE" and "cannot be served now" in message and deaths >= 2)
            or (code == "INTERNAL" and "was given up" in message and deaths - ask.deaths >= 2)
            or (code == "UNAVAILABLE" and "is draining" in message and self.history.drained)
            or (code == "UNAVAILABLE" and self.history.lacked_for(message, ask.begun_ns))
            or self.refused
        )
        if ask.way:
            troubled = ask.begun_ns < self.calm_ns or any(at >= self.calm_ns for at in self.history.deaths[-1:])
            excused = excused or bool(self.lanes.excuse(ask, code, message, deaths, troubled))
        if ask.step is not None:
            excused |= bool(self._sequences.excuse(ask.step, self.scheduler.clock.now_ns, code, message))
        if not excused:
            self.scheduler.defect(f"{ask} failed without a reason: {code}: {message}")
        self._close(ask, f"error: {message}")
        self.counts[f"error {code}"] += 1

    def check_patience(self) -> None:
        before = self.scheduler.clock.now_ns - PATIENCE_NS
        for ask in self.open.values():
            if ask.begun_ns < before and not ask.front.stopped:
                self.scheduler.defect(f"{ask} has no end after {PATIENCE_NS // SECOND} s")
            break

    # ---------------------------------------------------------------------------------------------------------- changes

    def change(self, kind: str, front: FrontProcess | Program, model: str, number: int, deadly: bool = False) -> None:
        change = Change(kind, model, number, self.scheduler.clock.now_ns, front, deaths=len(self.history.deaths))
        change.deadly = deadly
        change.moves = kind == "push" and number % 2 == 1
        self.history.changes[model].append(change)
        self.scheduler.tell(f"{'deadly ' * deadly}{change} at {front}")
        if isinstance(front, Program):
            front.call_soon(lambda: self._change_ended(change, self.lanes.push(change)))
        else:
            front.run_soon(self._carry_out(change))

    async def _carry_out(self, change: Change) -> None:
        content = _safetensors(change.number)
        operation: Any = {
            "load": LoadModel(change.model),
            "unload": UnloadModel(change.model),
            "push": PushParameters(change.model, 0, MAIN_SET, MemorySource(len(content)), move_sequences=change.moves),
        }[change.kind]
        memory = self.scheduler.given(lambda: _sealed(content)) if change.kind == "push" else -1
        front = change.front.front
        try:
            if front is None or front.endpoints is None:
                raise Unavailable("its front has stopped")
            await front.endpoints.ask(operation, end=memory)
            error = ""
        except ServingError as failure:
            error = failure.message or "?"
        finally:
            descriptors.close([memory] if memory >= 0 else [])
        self._change_ended(change, error)

    def _change_ended(self, change: Change, error: str) -> None:
        change.error, change.ended_ns = error, self.scheduler.clock.now_ns
        self.scheduler.tell(f"{change} is answered: {error or 'done'}")
        if error and not self.refused:
            if not self.history.why_failed(change):
                self.scheduler.defect(f"{change} failed without a reason: {error}")
            self.counts["failed change"] += 1
        self._ask_next(change)

    def _ask_next(self, change: Change) -> None:
        """Has the client of a change ask the model at once, through every front."""
        fronts = [front for front in self.daemon.children(FrontProcess) if front.serves]
        if self.refused or not fronts:
            return
        self.scheduler.clock.now_ns += 1
        if change.model == sequences.MODEL:
            self.step(fronts, self.scheduler.chance)
            return
        for front in fronts:
            self.ask(front, change.model, 1)
            if change.model in ensembles.STEPS:
                self.ask(front, ensembles.MODEL, 1)
        for program in self.lanes.living:
            self.ask_over_lane(program, change.model, 1, self.scheduler.chance)


def _safetensors(number: int) -> bytes:
    head = json.dumps({"k": {"dtype": "I32", "shape": [], "data_offsets": [0, 4]}}).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + struct.pack("<i", number)


def _sealed(content: bytes) -> int:
    memory = os.memfd_create("push", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(memory, content)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory
