"""The daemon ends, and systemd starts another one on the same folders and sockets, while its clients and programs go on.

The supervisor is killed between two turns, before or after one of its next datagrams, when it has just started a process, in its
start, in its stop; or it ends by itself, told to stop, or because its start has failed. What must hold:

* Its children end. Those that have begun are killed by the kernel, at once, or a little after they may see its sockets
  close; those that have not see that they close, or are killed with what the service has left. The next daemon begins when
  all are dead.
* What was asked at a front ends with the front, once; what was asked over a lane ends within its program's patience, whether
  the next daemon comes or not: an answer is of the daemon that was there when it was asked, or of a later one. A program that
  knows the model is not told before that, that nobody is there.
* The next daemon comes up with what is left: the socket's file on which nobody listens, files half written, folders of models
  that nobody has locked. It serves the files that were in the repository when it began, or newer ones, whatever was unloaded.
* No push of the daemon before is in force in the next one, and no worker is given one again, also where it was answered late.
* A model that the next daemon is to load is not unknown to it, from the first moment on.
* A drain ends with its daemon.
* The next one waits for what had served before it, and nothing else, to be ready; after an orderly stop for what it is to load.
* When a daemon has stopped in order nothing of it is left in its folders: neither sockets nor the list of what it had served.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

from tests.simulation import ensembles
from tests.simulation.daemon import Daemon
from tests.simulation.history import Change, History
from tests.simulation.processes import ChildProcess
from tests.simulation.scheduler import SECOND, Process

#: How long a child may go on whose supervisor has died: the kernel closes that one's sockets before it kills.
_MOST_ORPHANED_NS = 2_000_000
_NEVER_NS = 1 << 62
#: Seconds after which systemd starts the next daemon: as the unit says, or later where it has tried often.
_DELAYS = (0.5, 0.5, 0.5, 0.5, 4.0, 30.0)


class Keeper(Process):
    """Stands for the kernel, which kills the children of a dead supervisor, and for systemd, which starts the next daemon."""

    #: Nobody stops it.
    stopped = property(lambda _: False, lambda *_: None)

    def __init__(self, daemon: Daemon, history: History, folder: Path) -> None:
        super().__init__(daemon.scheduler, "systemd")
        self.weight = 1.0
        self._daemon = daemon
        self._history = history
        #: The folders that systemd keeps for the daemon.
        self._runtime, self._state = folder / "run", folder / "state"
        self._doomed: list[tuple[int, ChildProcess]] = []
        #: When the next daemon is started; 0: it was started, or none is.
        self._begins_ns = 0
        #: The loads of the models by the daemon that has begun last, until each has ended.
        self._loads: dict[str, Change] = {}
        #: The daemon is to stop: no other one is started.
        self.is_told = False
        #: No further daemon dies in its start.
        self.is_calm = False
        #: Called when a daemon has ended, and when the next one begins.
        self.on_end: Callable[[], None] = lambda: None
        self.on_begin: Callable[[], None] = lambda: None
        for place in (self._runtime, self._state):
            place.mkdir()
        daemon.environment = {"RUNTIME_DIRECTORY": str(self._runtime), "STATE_DIRECTORY": str(self._state)}
        daemon.on_supervisor_end = self._ended
        daemon.on_state = self._told

    @property
    def serves(self) -> bool:
        return True

    # ------------------------------------------------------------------------------------------------- what kills a daemon

    def kill(self, kind: str, chance: random.Random) -> None:
        """Kills the supervisor, or has it die later, as an event of that kind says."""
        supervisor = self._daemon.supervisor
        if not supervisor.alive:
            return
        if kind == "kill supervisor sending":
            supervisor.sends_left, supervisor.dies_sent = chance.randrange(12), chance.random() < 0.5
            return
        if kind == "kill supervisor starting":
            supervisor.spawns_left = chance.randrange(2)
            if children := self._daemon.children(ChildProcess):
                chance.choice(children).end(-signal.SIGKILL)
            return
        self.scheduler.tell("the supervisor is killed")
        supervisor.end(-signal.SIGKILL)

    def _ended(self, status: int) -> None:
        """Has everything end that the supervisor's end brings about. ``status``: how it has ended."""
        chance, now_ns = self.scheduler.chance, self.scheduler.clock.now_ns
        self._history.daemon_ended(now_ns)
        for load in self._loads.values():
            load.error, load.ended_ns = "the daemon has ended", now_ns
        self._loads = {}
        self._begins_ns = now_ns + int(chance.choice(_DELAYS) * SECOND)
        for process in self._daemon.children(ChildProcess):
            if process.has_begun and chance.random() < 0.5:
                process.end(-signal.SIGKILL)
            else:
                # Where no service ends what is left, those that have not begun end by themselves.
                left_ns = chance.choice((self._begins_ns, _NEVER_NS))
                dies_ns = now_ns + chance.randrange(_MOST_ORPHANED_NS) if process.has_begun else left_ns
                self._doomed.append((dies_ns, process))
        if status < 0:
            self._leave(chance)
        if self.is_told:
            self._begins_ns = 0
        else:
            self._load()
        self.on_end()
        if self not in self.scheduler.processes:
            self.scheduler.processes.append(self)
        self.idle = False

    def _load(self) -> None:
        """Notes that the next daemon loads every model, and that until then nobody knows whether it is served."""
        for model, changes in self._history.changes.items():
            load = Change("load", model, self._history.files[model], self.scheduler.clock.now_ns + 1, self, starts=True)
            changes.append(load)
            self._loads[model] = load

    def _leave(self, chance: random.Random) -> None:
        """Leaves what a daemon leaves that dies while it writes."""
        if chance.random() < 0.5:
            (self._runtime / "served.new").write_text('["a", "b')
        if chance.random() < 0.5:
            (self._state / f"tensord-models-{chance.randrange(1 << 30)}" / "1").mkdir(parents=True)

    # ---------------------------------------------------------------------------------------------------- the next daemon

    def iterate(self) -> bool:
        now_ns = self.scheduler.clock.now_ns
        due = [process for dies_ns, process in self._doomed if dies_ns <= now_ns]
        for process in due:
            process.end(-signal.SIGKILL)
        self._doomed = [(dies_ns, process) for dies_ns, process in self._doomed if process.alive]
        begins = 0 < self._begins_ns <= now_ns and not self._doomed
        if begins:
            self._begin()
        if not (self._doomed or self._begins_ns):
            self.scheduler.processes.remove(self)
        return begins or bool(due)

    def due_ns(self) -> int | None:
        if self._doomed:
            due_ns = min(dies_ns for dies_ns, _ in self._doomed)
            return due_ns if due_ns < _NEVER_NS else None
        return self._begins_ns or None

    def sockets(self) -> list[object]:  # type: ignore[override]
        return []

    def start(self) -> None:
        """Starts the next daemon after one that has stopped in order."""
        assert not self._daemon.children(ChildProcess)
        self._load()
        self._begin()

    def _begin(self) -> None:
        scheduler, chance = self.scheduler, self.scheduler.chance
        scheduler.tell("the next daemon is started")
        self._begins_ns = 0
        self._history.daemon_begins(scheduler.clock.now_ns)
        for model, load in self._loads.items():
            load.number = self._history.files[model]
        self._daemon.begin()
        self.idle = False
        if not self.is_calm and chance.random() < 0.2:
            supervisor = self._daemon.supervisor
            supervisor.sends_left, supervisor.dies_sent = chance.randrange(40), chance.random() < 0.5
            supervisor.spawns_left = chance.choice((-1, chance.randrange(5)))
        self.on_begin()

    def _told(self, model: str, state: str) -> None:
        """Notes what the supervisor tells fronts of a model."""
        load = self._loads.get(model)
        if load is not None and state in ("READY", "UNAVAILABLE"):
            load.error, load.ended_ns = "" if state == "READY" else "it has failed", self.scheduler.clock.now_ns
            self.scheduler.tell(f"{load} of the daemon's start {'is done' if load.done else 'has failed'}")
            del self._loads[model]

    # --------------------------------------------------------------------------------------------------- what is checked

    def judge_ready(self) -> None:
        """Checks that the daemon is ready, of which nobody wants anything: each of its models has served, or was taken away.

        An ensemble fails, and holds readiness up, of which somebody has unloaded a model before it had served. A model that is
        given up for now does, until it is tried again.
        """
        readiness, changes = self._daemon.supervisor.supervisor.models.readiness, self._history.changes
        failed = {name for name, again_ns in self._history.given_up.items() if not again_ns}
        failed |= {
            name
            for name, steps in ensembles.ALL.items()
            if any(each.starts and each.error for each in changes.get(name, ()))
            and any(each.kind == "unload" for step in steps for each in changes[step])
        }
        if not (readiness.ready or self._history.blamed or failed.issuperset(readiness.names)):
            self.scheduler.defect(f"the daemon is at rest and not ready: {readiness.sentence()}")

    def judge_left(self, folder: Path) -> None:
        """Checks that a daemon that has stopped in order has left nothing in its folders."""
        left = [
            str(found.relative_to(folder))
            for place in (folder, self._runtime, self._state)
            for found in place.iterdir()
            if found.name not in ("models", "run", "state", "served.new")
        ]
        if left:
            self.scheduler.defect(f"the daemon has stopped and has left {', '.join(sorted(left))}")
