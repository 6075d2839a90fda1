"""A simulated daemon, its clients, and everything that happens to them."""

from __future__ import annotations

import functools
import logging
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from tensord.config.options import (
    Arenas,
    ClientsOptions,
    Compression,
    ExecutablesOptions,
    Expert,
    Grpc,
    Http,
    Metrics,
    Options,
    RegionsOptions,
    Repository,
    Requests,
    ResponseCacheOptions,
    Workers,
)
from tensord.daemon.operator.drain import DrainPhase
from tensord.shm.errors import ServingError, Unavailable
from tests.simulation import callers, ensembles, regions, rounds, sequences, streamed
from tests.simulation.clients import MOST_BODY, WORKER_WAIT, Clients
from tests.simulation.daemon import Daemon
from tests.simulation.events import TROUBLES, Event, has_regions, reclaim
from tests.simulation.grpc_clients import GrpcConnection
from tests.simulation.history import History
from tests.simulation.http_clients import HttpConnection
from tests.simulation.lane_clients import Program
from tests.simulation.network import Connection
from tests.simulation.owners import Owners
from tests.simulation.processes import ChildProcess, FrontProcess, WorkerProcess
from tests.simulation.restarts import Keeper
from tests.simulation.scheduler import SECOND, Scheduler

#: Models that are asked without further ado, and all.
PLAIN = ("a", "b")
MODELS = (*PLAIN, sequences.MODEL, streamed.MODEL, regions.MODEL)
#: Models that some runs have besides, and the event with which they are asked.
BESIDES = {
    "ask a caller": callers.MODELS,
    "ask in rounds": (rounds.MODEL,),
    "ask a flow": (streamed.FLOW,),
    "ask for later": (streamed.LATER,),
}
#: The models that clients ask with single requests: the plain ones, the ensemble of these, and the decoupled one.
ASKED = (*PLAIN, ensembles.MODEL, streamed.MODEL)
#: How many values a request has; the last has more than a request may.
_SIZES = (*[1] * 30, *[100] * 10, *[5000] * 10, 10_000)
#: Programs ask nothing more while so many requests have no end.
_MOST_OPEN = 60
#: So many requests fill a lane.
_MANY = 150
#: What clients speak to fronts.
_KINDS = {"http": HttpConnection, "grpc": GrpcConnection}
#: What is said where something does not end in its time, though every process runs.
_TOO_LATE = ("were cut at the end of the grace period", "did not finish in time")

_SOURCE = """
import numpy as np

host = True
inputs = {{"x": "INT64[n]"}}
outputs = {{"y": "INT64[n]"}}

def create(path, config, device):
    def apply(params, inputs):
        return {{"y": inputs["x"] * 1000000000 + {files} * 10000 + int(params["k"])}}
    return apply, {{"k": np.int32(0)}}
"""


class Defects(logging.Handler):
    """Has every exception that somebody logs count as a fault."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        #: Called with what is said where something does not end in its time.
        self.on_late: Callable[[str], None] = lambda text: None
        #: Called with a model, what is said of it, and when.
        self.on_model: Callable[[str, str, int], None] = lambda model, text, now_ns: None

    def emit(self, record: logging.LogRecord) -> None:
        text, current = record.getMessage(), self._scheduler.current
        if current is not None and current.dies:
            return
        self._scheduler.tell(f"    {current}: {text}")
        if any(said in text for said in _TOO_LATE):
            self.on_late(f"{current}: {text}")
        if text.startswith("model '"):
            self.on_model(text.split("'")[1], text, self._scheduler.clock.now_ns)
        if record.exc_info and not isinstance(record.exc_info[1], ServingError):
            self._scheduler.defect(f"{text}: {logging.Formatter().formatException(record.exc_info)}")


class World:
    """A daemon, its clients, and everything that happens to it."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.scheduler = Scheduler(seed)
        #: The models' files, beside which the clients' socket is.
        self._folder = folder / "models"
        self._handler = Defects(self.scheduler)
        self._has_regions = has_regions(seed)
        besides = random.Random(f"models {seed}")
        #: The models of this run besides those of all runs.
        self._besides = [name for names in BESIDES.values() if besides.random() < 0.5 for name in names]
        #: The models that clients change.
        self._models = (*MODELS, *(name for name in self._besides if name not in ensembles.ALL))
        compressions: tuple[Compression, ...] = ("none", "low")
        compression = self.scheduler.chance.choice(compressions)
        options = Options(
            repository=Repository(
                paths=(str(self._folder),), control_mode="explicit", load=(*MODELS, ensembles.MODEL, *self._besides)
            ),
            http=Http(
                port=0,
                processes=1 + seed % 2,
                max_body_byte_size=MOST_BODY,
                response_compression=compression,
            ),
            grpc=Grpc(
                port=0,
                enabled=seed // 2 % 3 > 0,
                processes=max(1, seed // 2 % 3),
                max_message_byte_size=MOST_BODY,
                response_compression=compression,
            ),
            metrics=Metrics(port=0),
            regions=RegionsOptions(snapshot_key_prefixes=(regions.SNAPSHOT,), reclaim=reclaim(seed)),
            requests=Requests(worker_wait=WORKER_WAIT),
            response_cache=ResponseCacheOptions(byte_size=1 << 20),
            arenas=Arenas(byte_size=1 << 20, max_byte_size=4 << 20, inline_byte_size=64),
            workers=Workers(device="cpu", cpu=1, idle_timeout=10.0, execute_timeout=10.0, single_thread_flops=0),
            clients=ClientsOptions(
                socket=str(folder / "clients.sock"),
                max_in_flight=256 if self.scheduler.narrow else 4,
                segment_byte_size=1 << 20,
                response_byte_size=4 << 20,
            ),
            executables=ExecutablesOptions(),
            expert=Expert(spin_us=0, place_outputs=False, max_ahead=4096),
        )
        devices = [f"cpu:{number}" for number in range(1 + seed // 3 % 3)]
        self.daemon = Daemon(self.scheduler, options, devices)
        self.history = History(options.repository.load)
        self.clients = Clients(self.daemon, self.history, folder / "clients.sock", _KINDS)
        self._owners = Owners(self.clients.regions, self.scheduler, str(folder / "clients.sock"), reclaim(seed))
        self.clients.regions.owners = self._owners
        self.daemon.pure = PLAIN[:1]
        self.counts = self.clients.counts
        self._handler.on_late = self.clients.late
        self._handler.on_model = self.history.heard
        self.daemon.on_end = self._ended
        self.daemon.on_open = self._opened
        self.daemon.on_fence = lambda: self.history.fences.append(self.scheduler.clock.now_ns)
        self.daemon.is_deadly = self.clients.is_deadly
        self.daemon.on_run = self.clients.ran
        self.daemon.dies_of = self.clients.dies_of
        self._began = False
        #: A model is changed by one client at a time: then it is known exactly what is in force.
        self._one_by_one = self.scheduler.chance.random() < 0.5
        #: The daemon is told to stop in the middle of everything.
        self._hasty = self.scheduler.chance.random() < 0.3
        #: The daemon has ended, or was to end, before the end of the run.
        self._ends = False
        #: The drains whose end an operator awaits.
        self._drains = 0
        self._keeper = Keeper(self.daemon, self.history, folder)
        self._keeper.on_end = self._daemon_ended
        self._keeper.on_begin = self.clients.regions.daemon_begins

    # ----------------------------------------------------------------------------------------------------- what happens

    def _happen(self, event: Event) -> None:
        chance, clients, scheduler = random.Random(event.number), self.clients, self.scheduler
        fronts = [front for front in self.daemon.children(FrontProcess) if front.serves]
        workers, programs = self.daemon.children(WorkerProcess), clients.lanes.living
        match event.kind:
            case "ask" if fronts:
                for _ in range(chance.choice((1, 1, 1, 4))):
                    clients.ask(chance.choice(fronts), chance.choice(ASKED), chance.choice(_SIZES))
            case "ask in regions" if fronts and clients.regions.may_ask(chance):
                for _ in range(chance.choice((1, 1, 1, 4))):
                    clients.ask(
                        chance.choice(fronts), chance.choice(regions.ASKED), chance.choice(_SIZES), places=chance
                    )
            case "region" if fronts:
                clients.regions.happen(fronts, chance)
            case "owner":
                self._owners.happen(chance)
            case "end owner":
                self._owners.end_one(chance)
            case kind if kind in BESIDES:
                self._ask_besides(BESIDES[kind], fronts, chance)
            case "deadly ask" if fronts:
                clients.ask(chance.choice(fronts), chance.choice(PLAIN), 1, deadly=True)
            case "ask over a lane" if programs and len(clients.open) < _MOST_OPEN:
                for _ in range(chance.choice((1, 1, 1, 4, 10))):
                    model, size = chance.choice(ASKED), chance.choice((1, 1, 1, 100, 5000))
                    clients.ask_over_lane(chance.choice(programs), model, size, chance)
            case "full lanes" if workers and programs and len(clients.open) < _MOST_OPEN:
                self._fill(workers, chance.choice(programs), chance)
            case "program" if len(programs) < 3:
                clients.lanes.start()
            case "kill program" if programs:
                clients.lanes.kill(chance.choice(programs))
            case "program leaves" if programs:
                clients.lanes.leave(chance.choice(programs))
            case "step" if fronts:
                for _ in range(chance.choice((1, 1, 3))):
                    clients.step(fronts, chance)
            case "cancel" if clients.open:
                clients.cancel(chance.choice(list(clients.open.values())))
            case "read nothing" if made := [each for each in clients.network.connections() if each.sock is not None]:
                self._rest(chance.choice(made), chance)
            case "between responses" if begun := [ask for ask in clients.open.values() if ask.got]:
                ask, connection = begun[-1], begun[-1].connection
                if chance.random() < 0.3:
                    clients.cancel(ask)
                elif connection is not None and chance.random() < 0.5:
                    self._rest(connection, chance)
                else:
                    self._happen(Event(0, chance.choice(TROUBLES), event.number))
            case "load" | "unload" | "push" | "deadly push" if fronts:
                kind = event.kind.removeprefix("deadly ")
                changers = (
                    [*(each for each in fronts if each.protocol == "http"), *programs] if kind == "push" else fronts
                )
                if not changers:
                    return
                front, model = chance.choice(changers), chance.choice(self._models)
                if kind == "push" and model in (rounds.MODEL, streamed.LATER):
                    return  # it has no parameters
                if self._one_by_one and any(change.model == model for change in self.history.pending()):
                    return
                number = self._write(model) if kind == "load" else len(self.history.changes[model])
                clients.change(kind, front, model, number, kind != event.kind)
            case "kill client" if able := [each for each in clients.network.living if not each.changes]:
                clients.network.kill(chance.choice(able))
            case "kill worker" if workers:
                self._kill(chance.choice(workers))
            case "kill worker in a run" if workers:
                chance.choice(workers).dies_in_run = True
            case "kill worker sending" if workers:
                chance.choice(workers).dies_sending(chance)
            case "kill front" if fronts:
                self._kill(chance.choice(fronts))
            case "kill front sending" if fronts:
                chance.choice(fronts).dies_sending(chance)
            case "no workers" if workers:
                seconds = chance.choice((8.0, 30.0, 60.0))
                scheduler.tell(f"there are no workers for {seconds} s")
                self.daemon.absent_until_ns = self.history.trouble_ns = scheduler.clock.now_ns + int(seconds * SECOND)
                for worker in workers:
                    self._kill(worker)
                for program in programs:
                    # Who asks now may find a lane's end by what it sends.
                    for _ in range(chance.choice((0, 1, 4))):
                        clients.ask_over_lane(program, chance.choice(ASKED), 1, chance, way="future")
            case "no memory":
                model, seconds = chance.choice(self._models), chance.choice((1.0, 10.0, 60.0))
                scheduler.tell(f"workers that load '{model}' within {seconds} s are killed")
                self.daemon.deadly_loads[model] = scheduler.clock.now_ns + int(seconds * SECOND)
            case "kill supervisor" | "kill supervisor sending" | "kill supervisor starting":
                self._ends = True
                self._keeper.kill(event.kind, chance)
            case "restart":
                self._ends = True
                self._restart()
            case "drain":
                self._at_supervisor(functools.partial(self._drain, chance.choice((0.0, 0.3, 3.0))))
            case "end drain":
                self._at_supervisor(self._end_drain)
            case "stop" if running := [each for each in scheduler.processes if each.alive and not each.stopped]:
                process = chance.choice(running)
                process.stopped = True
                scheduler.tell(f"{process} is stopped")
                self._troubled()
            case "go on":
                self._troubled()
                for process in scheduler.processes:
                    if process.stopped:
                        process.stopped, process.idle = False, False
                        scheduler.tell(f"{process} goes on")
            case "descriptors run out":
                running = [worker for worker in workers if worker.worker is not None]
                process = chance.choice([self.daemon.supervisor] * 3 + fronts + running)
                process.lack = chance.choice((0.1, 0.5, 1.0))
                self.history.lacking = True
                scheduler.tell(f"{process} has as many files open as it may, with a chance of {process.lack}")
            case "descriptors are back":
                self._descriptors_are_back()
            case "slow":
                chance.choice(scheduler.processes).weight = chance.choice((0.01, 0.1, 1.0, 10.0))
            case "jump":
                seconds = chance.choice((0.01, 0.1, 1.0, 3.0))
                scheduler.tell(f"the clock jumps by {seconds} s")
                scheduler.clock.now_ns += int(seconds * SECOND)
                self._troubled()
        if chance.random() < 0.3:
            clients.release()

    def _restart(self) -> None:
        """Stops the daemon in order, and starts the next one at once."""
        raise NotImplementedError

    def _ask_besides(self, models: Sequence[str], fronts: list[FrontProcess], chance: random.Random) -> None:
        """Has clients ask models that only some runs have, over fronts and lanes."""
        clients, programs = self.clients, self.clients.lanes.living
        if models[0] not in self._besides or len(clients.open) >= _MOST_OPEN:
            return
        for _ in range(chance.choice((1, 1, 2, 6))):
            model, size = chance.choice(models), chance.choice((1, 1, 1, 100, 1000))
            if programs and chance.random() < 0.4:
                clients.ask_over_lane(chance.choice(programs), model, size, chance)
            elif fronts:
                clients.ask(chance.choice(fronts), model, size)

    def _fill(self, workers: list[WorkerProcess], program: Program, chance: random.Random) -> None:
        """Has a program send until there is no room, neither in its memory nor in a narrow lane, of which no worker reads."""
        self.scheduler.tell(f"{program} sends as much as it can to workers that are stopped")
        self._troubled()
        for worker in workers:
            worker.stopped = True
        program.fills, size = True, chance.choice((1, 100, 5000))
        asked = range(len(self.clients.asks) + 1, len(self.clients.asks) + _MANY + 1)
        for _ in asked:
            self.clients.ask_over_lane(program, chance.choice(PLAIN), size, chance, way="future")
        for _ in range(chance.randrange(5 * _MANY)):
            self.scheduler.run(program)
        for number in asked:
            if number in self.clients.open and chance.random() < 0.6:
                self.clients.cancel(self.clients.open[number])
        for _ in range(chance.randrange(5 * _MANY)):
            self.scheduler.run(program)
        if chance.random() < 0.5:
            self._happen(Event(0, "go on", 0))

    def _rest(self, connection: Connection, chance: random.Random) -> None:
        seconds = chance.choice((0.001, 0.01, 0.1, 3.0, 40.0))
        if not (connection.private or connection.closed):
            self.scheduler.tell(f"the client of {connection} reads nothing for {seconds} s")
            connection.rest(seconds)

    def _at_supervisor(self, call: Callable[[], object]) -> None:
        """Has the supervisor's loop call a function, as for an operator."""
        process = self.daemon.supervisor
        if process.alive:
            # One that finds no descriptor for its first worker never listens to operators.
            process.loop.call_soon(lambda: call() if hasattr(process, "supervisor") else None)
            process.idle = False

    def _drain(self, seconds: float) -> None:
        drain = self.daemon.supervisor.supervisor.drain
        if drain.phase is not DrainPhase.NONE or self.clients.stopped_ns:
            return
        self.scheduler.tell(f"an operator begins a drain of {seconds} s")
        self.history.drained, self.history.drained_ns = True, 0
        drain.begin(seconds)
        self._drains += 1
        self.daemon.supervisor.loop.create_task(self._drained())

    async def _drained(self) -> None:
        """Waits for the end of a drain, and checks that it comes in time, and that nothing is in flight then."""
        clients, begun_ns = self.clients, self.scheduler.clock.now_ns
        try:
            await self.daemon.supervisor.supervisor.drain.finished()
        except Unavailable as error:
            self.scheduler.tell(f"the drain has not ended: {error.message}")
            is_late = "still in flight" in error.message
            if is_late and not (clients.open or self.history.trouble_ns > begun_ns or self._stopped()):
                self.scheduler.defect(f"nobody waits for an answer, and the drain has not ended: {error.message}")
        else:
            self.scheduler.tell("the drain has ended")
            for front in self.daemon.children(FrontProcess):
                if front.serves and (count := front.front.submitter.in_flight()):
                    self.scheduler.defect(f"{count} requests are in flight at {front} after a drain")
        self.history.drained_ns = self.scheduler.clock.now_ns
        self._drains -= 1

    def _stopped(self) -> bool:
        return any(process.stopped for process in self.scheduler.processes)

    def _end_drain(self) -> None:
        drain = self.daemon.supervisor.supervisor.drain
        if drain.phase is not DrainPhase.NONE:
            self.scheduler.tell("an operator ends the drain")
            drain.end()

    def _descriptors_are_back(self) -> None:
        if self.history.lacking:
            self.scheduler.tell("descriptors are back")
            self.history.lacking, self.history.lacked_ns = False, self.scheduler.clock.now_ns
            for process in self.scheduler.processes:
                process.lack = 0.0

    def _troubled(self) -> None:
        self.history.trouble_ns = max(self.history.trouble_ns, self.scheduler.clock.now_ns)

    def _daemon_ended(self) -> None:
        """Notes that nobody awaits the end of a drain any more, because the daemon has ended."""
        self._drains = 0
        self._troubled()
        self.history.ends.append(self.scheduler.clock.now_ns)
        self.clients.regions.daemon_ended()

    def _kill(self, process: ChildProcess) -> None:
        self.scheduler.tell(f"{process} is killed")
        process.end(-signal.SIGKILL)

    def _ended(self, process: ChildProcess) -> None:
        self._owners.process_ended(process)
        if not isinstance(process, FrontProcess):
            self.history.deaths.append(self.scheduler.clock.now_ns)
            if self.daemon.supervisor.alive:
                self.history.ends.append(self.scheduler.clock.now_ns)

    def _opened(self, front: FrontProcess) -> None:
        """Has clients ask a front as soon as it can be asked."""
        if self._began and not self.clients.stopped_ns:
            for model in ASKED:
                self.clients.ask(front, model, 1)
            self.clients.regions.opened(front)

    def _write(self, model: str) -> int:
        """Writes new files of a model. Returns their number."""
        number = self.history.files[model] = self.history.files[model] + 1
        folder = self._folder / model / "1"
        folder.mkdir(parents=True, exist_ok=True)
        source = _SOURCE
        if model == sequences.MODEL:
            source = sequences.SOURCE
            (folder.parent / "config.pbtxt").write_text(sequences.CONFIG)
        elif model == streamed.MODEL:
            source = streamed.SOURCE
        elif model == streamed.LATER:
            source = streamed.LATER_SOURCE
            (folder.parent / "config.pbtxt").write_text(streamed.LATER_CONFIG)
        elif model in callers.MODELS:
            source = callers.SOURCE
        elif model == rounds.MODEL:
            source = rounds.SOURCE
            (folder.parent / "config.pbtxt").write_text(rounds.CONFIG)
        elif model == regions.MODEL:
            source = regions.SOURCE
            (folder.parent / "config.pbtxt").write_text(regions.CONFIG)
        (folder / "model.py").write_text(source.format(files=number))
        return number
