"""A simulated daemon from its start to its end."""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable, Iterable
from typing import Any

from tensord.daemon.operator.drain import DrainPhase
from tensord.daemon.processes.shutdown import DaemonPhase
from tests.simulation import ensembles, lacking, region_clients, regions, streamed, threads, worker_threads
from tests.simulation.clients import PATIENCE_NS
from tests.simulation.events import Event
from tests.simulation.history import Change
from tests.simulation.network import LAST_CALL_NS
from tests.simulation.processes import ChildProcess, FrontProcess, WorkerProcess
from tests.simulation.scheduler import SECOND
from tests.simulation.world import ASKED, PLAIN, World

#: What a front counts that is 0 when it is idle.
_AT_REST = ("in_flight", "waiting_for_worker", "throttled", "answers_held", "leases")


class WholeRun(World):
    """Runs a daemon, its clients and everything that happens, and checks how it all ends."""

    def run(self, events: Iterable[Event], turns: int) -> list[Event]:
        """Runs a daemon from its start to its end, and has ``events`` happen meanwhile. Returns those that have happened."""
        happened: list[Event] = []
        for model in self._models:
            self._write(model)
        for model, config in ((ensembles.MODEL, ensembles.CONFIG), (streamed.FLOW, streamed.FLOW_CONFIG)):
            (self._folder / model / "1").mkdir(parents=True)
            (self._folder / model / "config.pbtxt").write_text(config)
        logger, level = logging.getLogger("tensord"), logging.getLogger("tensord").level
        logger.addHandler(self._handler)
        logger.setLevel(logging.INFO)
        propagates, logger.propagate = logger.propagate, False
        try:
            with (
                self.daemon.in_place(),
                threads.in_place(self.scheduler),
                worker_threads.in_place(self.scheduler),
                lacking.in_place(self.scheduler),
                self._owners.in_place(),
            ):
                try:
                    self.daemon.begin()
                    self._until(self._is_up, "the daemon serves")
                    now_ns = self.scheduler.clock.now_ns
                    for model, changes in self.history.changes.items():
                        changes.append(Change("load", model, 1, 0, None, "", now_ns))
                    self._began = True
                    self.clients.lanes.start()
                    for _ in range(2):
                        self.clients.network.start()
                    if self._has_regions:
                        self.clients.regions.begin(self._serving(), self.scheduler.chance)
                    self._play(events, turns, happened)
                    self._go_on()
                    if not (self.scheduler.fault or self._hasty):
                        self._settle()
                    if not self.scheduler.fault:
                        self._stop()
                    if not self.scheduler.fault:
                        self._judge_end()
                finally:
                    self._clear()
        finally:
            logger.removeHandler(self._handler)
            logger.setLevel(level)
            logger.propagate = propagates
        return happened

    def _play(self, events: Iterable[Event], turns: int, happened: list[Event]) -> None:
        scheduler = self.scheduler
        for event in events:
            for _ in range(event.gap):
                if not scheduler.turn():
                    if scheduler.chance.random() < 0.7:
                        break
                    scheduler.pass_time()
                scheduler.step += 1
                if scheduler.fault or scheduler.step >= turns:
                    return
            if scheduler.clock.now_ns < self.daemon.absent_until_ns:
                # Clients' patience, and what waits for a worker, takes longer than many a run.
                later = scheduler.clock.now_ns + SECOND
                self._until(functools.partial(self._is_later, later), "time passes")
            scheduler.step += 1
            happened.append(event)
            self.counts[event.kind] += 1
            self._happen(event)
            if len(happened) % 16 == 0:
                self.clients.check_patience()
                self.clients.regions.check()
                supervisor = self.daemon.supervisor
                if not supervisor.alive or (supervisor.up and not supervisor.answers(self._connections())):
                    self.history.conclude(scheduler.clock.now_ns)
                self.daemon.bury(20 * SECOND)
                self.clients.lanes.bury()
            if scheduler.fault or scheduler.step >= turns:
                return

    def _connections(self) -> int:
        """Returns how many connections to the supervisor the living programs have."""
        each = (
            len([sock for sock in program.sockets_opened if sock.fileno() >= 0])
            for program in self.clients.lanes.living
        )
        return sum(each) + self._owners.links()

    def _until(self, condition: Callable[[], object], what: str, most_ns: int = PATIENCE_NS) -> None:
        until_ns = self.scheduler.clock.now_ns + most_ns
        while not condition() and not self.scheduler.fault:
            if not self.scheduler.turn():
                self.scheduler.pass_time()
            self.scheduler.step += 1
            if self.scheduler.clock.now_ns > until_ns:
                self.scheduler.defect(f"it is not so after {most_ns // SECOND} s that {what}")

    def _is_up(self) -> bool:
        supervisor = self.daemon.supervisor
        return supervisor.alive and supervisor.up and supervisor.supervisor.phase is DaemonPhase.SERVING

    def _is_later(self, than_ns: int) -> bool:
        return self.scheduler.clock.now_ns > than_ns

    def _serving(self) -> list[FrontProcess]:
        return [front for front in self.daemon.children(FrontProcess) if front.serves]

    def _is_quiet(self) -> bool:
        """Returns whether no client waits for anything; has those end their sequences that have some."""
        fronts = self._serving()
        ended = fronts and self.clients.step(fronts)
        if self.scheduler.step % 100 == 0:
            self.clients.release()
        waits = self.clients.open or self.history.pending() or self.clients.regions.pending()
        return not (ended or self._drains or waits)

    def _go_on(self) -> None:
        """Ends what troubles the daemon."""
        for process in self.scheduler.processes:
            process.stopped, process.weight, process.sends_left, process.dies_in_run = False, 1.0, -1, False
        self._descriptors_are_back()
        self._keeper.is_calm, self.daemon.supervisor.spawns_left = True, -1
        self._at_supervisor(self._end_drain)
        self.daemon.deadly_loads.clear()
        if self._hasty:
            # A worker that has not begun would not hear that it is to stop.
            self.daemon.absent_until_ns = 0
        for client in self.clients.network.living:
            for connection in client.resting:
                connection.rests_until_ns = 0
        self.scheduler.wake()
        self.clients.release()
        if self.daemon.supervisor is not self.daemon.supervisors[0] or not self.daemon.supervisor.alive:
            self._until(self._is_up, "the next daemon serves")
            self._at_supervisor(self._end_drain)

    def _settle(self) -> None:
        """Lets everything come to rest, and checks that nothing is left."""
        scheduler, clients, pending = self.scheduler, self.clients, self.history.pending
        self._until(self._is_quiet, "every request and every change has its end")
        if scheduler.fault:
            scheduler.tell(f"open: {', '.join(map(str, (*clients.open.values(), *pending())))}")
            return
        self._until(self._has_workers, "there are workers")
        self._calm()
        clients.regions.judge_rest()
        if scheduler.chance.random() < 0.5:
            self._drain_at_rest()
        if self._has_regions:
            clients.regions.begin(self._serving(), scheduler.chance)
            self._until(self._is_quiet, "regions are registered")
        # Whoever asks now is answered.
        self.history.drained = False
        clients.calm_ns = scheduler.clock.now_ns
        asked = (*ASKED, *self._besides)
        for front in self.daemon.children(FrontProcess):
            for model in asked if front.serves else ():
                clients.ask(front, model, 1)
            for _ in range(2 * len(clients.regions.names)) if front.serves else ():
                clients.ask(front, scheduler.chance.choice(regions.ASKED), 1, places=scheduler.chance)
        for program in clients.lanes.living:
            for model in asked:
                clients.ask_over_lane(program, model, 1, scheduler.chance)
        self._until(self._is_quiet, "every request has its end after everything has come to rest")
        self._calm()
        self._judge_watches()
        self._keeper.judge_ready()
        if self._has_regions:
            self._end_regions()
        for program in clients.lanes.living:
            clients.lanes.leave(program)
        self._until(lambda: not any(each.alive for each in clients.lanes.programs), "every program has left")
        self._calm()
        lanes = self.daemon.supervisor.supervisor.lanes
        if lanes._lanes or lanes._connections:
            scheduler.defect(f"programs that have left have something open: {lanes.statistics()}")
        for front in self.daemon.children(FrontProcess):
            if front.front is None or not front.serves:
                continue
            figures = front.front.submitter.statistics()
            if busy := [each for each in front.front.open_connections if not each.asks_nothing]:
                scheduler.defect(f"{front} has connections that wait for something: {busy}")
            serving: Any = front.front._serving
            if size := serving.collected_byte_size if front.protocol == "http" else serving.collected:
                scheduler.defect(f"{front} collects {size} bytes of requests that nobody sends")
            if any(figures[name] for name in _AT_REST):
                scheduler.defect(f"{front} has something left: { ({name: figures[name] for name in _AT_REST}) }")
        for worker in self.daemon.children(WorkerProcess):
            running = worker.worker
            if running is not None and running._clients:
                scheduler.defect(f"{worker} has {len(running._clients)} lanes of programs that have left")
            if running is not None and (found := worker_threads.left(running)):
                scheduler.defect(f"{worker} has something left: {found}")
            submitters = running._submitters.values() if running is not None else ()
            if len({submitter.peer for submitter in submitters}) < len(submitters):
                scheduler.defect(f"{worker} has two lanes of a front")
            for submitter in submitters:
                requests, leases = len(submitter.in_flight), submitter.lane.arena.statistics()["leases"]
                if requests or leases:
                    scheduler.defect(f"{worker} has something left: {requests} requests, {leases} leases")

    def _end_regions(self) -> None:
        """Unregisters all regions, and checks that nothing of them is left."""
        known, chance = self.clients.regions, self.scheduler.chance
        for kind in ("status", "unregister", "status"):
            known.call(kind, "", self._serving(), chance)
            self._until(self._is_quiet, "what was asked of regions is answered")
            self._calm()
        self._owners.close()
        known.judge_end(self.daemon.children(WorkerProcess))

    def _has_workers(self) -> bool:
        there = len(self.daemon.children(WorkerProcess)) == len(self.daemon.devices)
        return there and self._is_later(self.daemon.absent_until_ns)

    def _drain_at_rest(self) -> None:
        """Drains the daemon, of which nobody asks anything: that ends, whatever calls and connections are open."""
        self._at_supervisor(functools.partial(self._drain, 0.0))
        self._until(lambda: self.history.drained_ns, "a drain has ended")
        self._calm()
        self._judge_watches()
        self._at_supervisor(self._end_drain)
        self._calm()

    def _judge_watches(self) -> None:
        """Checks that who watches the daemon's health knows how it is."""
        supervisor = self.daemon.supervisor.supervisor
        serves = supervisor.models.readiness.ready and supervisor.drain.phase is DrainPhase.NONE
        for connection in self.clients.network.connections():
            if not (connection.closed or connection.ends) and connection.sock is not None:
                for told in connection.watched():
                    if told is not serves:
                        self.scheduler.defect(f"a watch over {connection} was told last {told}, and it is {serves}")

    def _calm(self) -> None:
        for _ in range(3):
            self.clients.release()
            rests = self.scheduler.clock.now_ns + SECOND
            self._until(functools.partial(self._is_later, rests), "time passes")

    def _stop(self) -> None:
        """Stops the daemon in order, while clients go on asking: every process ends by itself, and what was taken is answered.

        In some runs its supervisor is killed meanwhile.
        """
        supervisor, clients, chance = self.daemon.supervisor, self.clients, self.scheduler.chance
        self._keeper.is_told = True
        children = self.daemon.children(ChildProcess)
        # Of programs that are still there, only the kernel closes the supervisor's sockets.
        self.scheduler.cut_short |= bool(clients.lanes.programs or self._owners.living)
        self._ask_on()
        for _ in range(chance.randrange(300)):
            self.scheduler.turn()
        uneven = chance.random() < 0.5
        for process in self.scheduler.processes if uneven else ():
            process.weight = self.scheduler.weight()
        now_ns = clients.stopped_ns = self.scheduler.clock.now_ns
        self.scheduler.tell("the daemon is told to stop")
        supervisor.supervisor._shutdown.signalled()
        supervisor.idle = False
        for moment in sorted(now_ns + chance.randrange(3 * LAST_CALL_NS // 2) for _ in range(chance.randrange(6))):
            self._until(lambda at=moment: self._is_later(at), "time passes")  # type: ignore[misc]
            self._ask_on()
            if chance.random() < 0.3:
                self._lag()
        if self._ends and chance.random() < 0.3:
            for _ in range(chance.choice((0, 10, 100, 300))):
                self.scheduler.turn()
            self._keeper.kill(chance.choice(("kill supervisor", "kill supervisor sending")), chance)
        self._until(lambda: not supervisor.alive, "the daemon has stopped")
        self._until(lambda: not self.daemon.children(ChildProcess), "its processes have ended")
        self._until(lambda: not clients.waits, "who has asked knows how that ended")
        for process in children:
            if process.status not in (0, -signal.SIGKILL, -signal.SIGSEGV) or process.alive:
                self.scheduler.defect(f"{process} ended with status {process.status}")

    def _restart(self) -> None:
        self._go_on()
        if self.scheduler.fault:
            return
        self._stop()
        if self.scheduler.fault:
            return
        self._start_anew()
        for process in self.scheduler.processes:
            process.weight = self.scheduler.weight()

    def _start_anew(self) -> None:
        clients = self.clients
        if self.daemon.supervisor.status == 0:
            self._keeper.judge_left(self._folder.parent)
            if not self.scheduler.cut_short and (mapped := region_clients.mappings(clients.regions.prefix)):
                self.scheduler.defect(
                    f"the daemon has stopped, and {len(mapped)} mappings of regions are left: {mapped[0]}"
                )
        clients.stopped_ns, clients.cut = 0, False
        self._keeper.is_told = self._keeper.is_calm = False
        self._keeper.start()

    def _judge_end(self) -> None:
        """Checks that nothing is left of a daemon that has stopped; starts another one where its supervisor was killed."""
        if self.daemon.supervisor.status != 0:
            self._start_anew()
            self._keeper.is_calm = True
            # Nor does it die of what was drawn when it began.
            self.daemon.supervisor.sends_left = self.daemon.supervisor.spawns_left = -1
            self._until(self._is_up, "the next daemon serves")
            self._ends = False
            if not self.scheduler.fault:
                self._stop()
        self._until(lambda: not self.clients.open, "programs know that their daemon has ended")
        if not self.scheduler.fault:
            self._keeper.judge_left(self._folder.parent)

    def _lag(self) -> None:
        """Has somebody, mostly a front, read late what is sent to him, as on a host that is out of breath."""
        chance = self.scheduler.chance
        process = chance.choice(self.daemon.children(FrontProcess) or self.scheduler.processes)
        process.stopped = True
        for _ in range(chance.randrange(80)):
            self.scheduler.turn()
        self.scheduler.clock.now_ns += chance.randrange(LAST_CALL_NS)
        process.stopped = process.idle = False

    def _ask_on(self) -> None:
        """Has clients ask over connections that are open, and over new ones to fronts that serve."""
        chance = self.scheduler.chance
        for connection in [each for each in self.clients.network.connections() if each.usable]:
            if not connection.private and chance.random() < 0.5:
                self.clients.ask_over(connection, chance.choice(PLAIN), chance.choice((1, 1, 100, 5000)))
        for front in self.daemon.children(FrontProcess):
            if front.serves and chance.random() < 0.5:
                self.clients.ask(front, chance.choice(PLAIN), 1)

    def _clear(self) -> None:
        for process in self.daemon.children(ChildProcess):
            process.end(-signal.SIGKILL)
        for client in list(self.clients.network.living):
            self.clients.network.end(client)
        self.clients.open.clear()
        self.clients.asks.clear()
        self.clients.lanes.end()
        self._owners.close()
        self.clients.regions.close()
        self.daemon.bury()
        self._keeper.is_told = True
        self.daemon.supervisor.end(-signal.SIGKILL)
        for supervisor in self.daemon.supervisors:
            supervisor.bury()
        self.scheduler.processes.clear()
