"""Clients with shared memory: objects in /dev/shm, the regions that they register there, and requests whose tensors lie in them.

What must hold, as docs/shared-memory.md says:

* An output is in the range that was named, and no byte outside of such ranges ever changes; nor does an object's size.
* Nothing is written behind a request's end. What a request whose client left may still write is over as soon as its region was
  unregistered and is listed no more: then the memory is the client's alone.
* A region is found by every request that comes between the answers to "register" and "unregister", whatever dies, and by none
  behind the latter. It means the object that its key named when it was registered last, also where that has lost its name.
* It is listed, as it was registered, as long as it can be used, and no longer.
* An object that loses its pages costs the requests that use it an error, and nobody else anything. So it is until it is
  registered again (where it is mapped), or until its bytes are back (where it is not).
* What is registered once more stays as it was where that is refused; a name is free as soon as "unregister" is answered.
* In the end no region, lease, descriptor or mapping is left.

Each object has a double, of which its clients know that it must have these bytes now. Ranges that requests may write to now are
left out of the comparison, for each object that the region's name may mean.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.owners import Owner
from tests.simulation.processes import FrontProcess, SupervisorProcess, WorkerProcess
from tests.simulation.region_requests import UNKNOWN, RegionRequests
from tests.simulation.regions import (
    ASKED,
    PAGE,
    PREFIX,
    Call,
    File,
)
from tests.simulation.scheduler import SECOND

if TYPE_CHECKING:
    from tensord.daemon.regions.region_registry import RegionRegistry
    from tests.simulation.clients import Ask

#: So many names are in use at most, and each for so many calls: then another one is taken.
_MOST_NAMES, _MOST_CALLS = 4, 30
#: So many requests whose clients have left are remembered of a name until it is given up.
_MOST_DOUBTFUL = 4
_IF_UP = {
    "new": 0.7,
    "again": 2,
    "unregister": 4,
    "status": 4,
    "status of all": 2,
    "unregister all": 0.2,
    "replace": 1.5,
    "change": 6,
    "cut": 1.5,
}
_IF_CUT = {"new": 0.3, "again": 4, "unregister": 1, "status": 2, "change": 4}
_IF_DOWN = {"new": 12, "again": 4, "unregister": 1, "status": 3, "change": 2}
_TAKEN, _NO_KEY = "already in manager", "Unable to open shared memory region"


class RegionClients(RegionRequests):
    """All regions and their objects, what is done with them, and whether what clients are told of them can be right."""

    # -------------------------------------------------------------------------------------------------------------- calls

    def begin(self, fronts: list[FrontProcess], chance: random.Random) -> None:
        """Registers some regions, mostly."""
        for _ in range(chance.choice((0, 1, 2, 2)) if fronts else 0):
            self._register(self.new_name(), self._new_file(chance), fronts, chance)

    def new_name(self) -> str:
        name = f"r{next(self._numbers)}"
        self.names.append(name)
        self._in_force.of(name).extend(each for each in self._alls if not each.ended_ns)
        return name

    def happen(self, fronts: list[FrontProcess], chance: random.Random) -> None:
        """Has a client do something with its regions or objects."""
        now_ns = self._scheduler.clock.now_ns
        self.check()
        for name in [name for name in self.names if self._is_worn(name)]:
            self._retire(name)
        if len(self.open) < 3 and (
            waiting := [name for name in sorted(self._retired) if not any(call.model == name for call in self.open)]
        ):
            name = chance.choice(waiting)
            down = self._in_force.is_down(name, now_ns)
            self.call("status" if down else "unregister", name, fronts, chance)
        supervisor = self._clients.daemon.supervisor.supervisor
        if not supervisor.workers.ready() and chance.random() < 0.8:
            return  # whoever registers something now is told that there is no worker
        busy = len(self.open) >= chance.choice((4, 6, 8))
        free = [name for name in self.names if not any(call.model in (name, "") for call in self.open)]
        if busy or not (free or chance.random() < 0.1):
            if chance.random() < 0.3:
                self._change_object(chance)
            return
        if len(self.names) < 2 or (len(self.names) < _MOST_NAMES and chance.random() < 0.3):
            self._register(self.new_name(), self._new_file(chance), fronts, chance)
            return
        if not free or chance.random() < 0.1:
            free = self.names
        elif lacking := [name for name in free if not self._is_whole(name, now_ns)]:
            free = lacking if chance.random() < 0.6 else free
        name = chance.choice(free)
        call = self.last(name)
        is_up = self._in_force.is_up(name, now_ns) is not None
        doing = _IF_UP if self._is_whole(name, now_ns) else _IF_CUT if is_up else _IF_DOWN
        is_sealed = call is not None and call.files[-1].sealed
        match chance.choices(list(doing), list(doing.values()))[0]:
            case "again" | "replace" if is_sealed:
                self.owners.happen(chance)
            case "new":
                self._register(name, self._new_file(chance), fronts, chance)
            case "again" if call is not None:
                self._register(name, call.files[-1], fronts, chance, call)
            case "unregister":
                self.call("unregister", name, fronts, chance)
            case "status":
                self.call("status", name, fronts, chance)
            case "status of all":
                self.call("status", "", fronts, chance)
            case "unregister all":
                self.call("unregister", "", fronts, chance)
            case "replace" if call is not None:
                self._replace(call, chance)
                if chance.random() < 0.7:
                    self._register(
                        name,
                        call.files[-1] if not self._by_key(call.key) else self._by_key(call.key),
                        fronts,
                        chance,
                        call,
                    )
            case "cut" if call is not None:
                self._cut(call.files[-1], chance)
            case "change":
                self._change_object(chance)

    def _change_object(self, chance: random.Random) -> None:
        """Has a client unlink, truncate, grow or write to an object."""
        if not self.files:
            return
        file = chance.choice(self.files[-5:])
        short = [file for file in self.files if file.is_short]
        if short and chance.random() < 0.6:
            file = chance.choice(short)
            self._resize(file, file.full_size)
        elif chance.random() < 0.15:
            self._resize(file, min(len(file.double), chance.choice((0, PAGE, file.full_size // 2, file.full_size - 1))))
        elif chance.random() < 0.2:
            file.unlink(self._scheduler.clock.now_ns)
            self._scheduler.tell(f"{file} loses its name")
        else:
            self._scribble(file, chance)

    def _is_worn(self, name: str) -> bool:
        calls = self._in_force.of(name)
        asked = (call for call in calls if call.kind in ("register", "unregister") and not call.of_daemon)
        lost = any(call.error is None and call not in self.open for call in asked)
        doubtful = [
            use for use in self._uses.values() if use.doubtful and any(each.region == name for each in use.places)
        ]
        return lost or len(calls) > _MOST_CALLS or len(doubtful) > _MOST_DOUBTFUL

    def _retire(self, name: str) -> None:
        self.names.remove(name)
        self._retired.add(name)

    def _by_key(self, key: str) -> Any:
        return next((file for file in self.files if file.key == key and file.linked), None)

    def _new_file(self, chance: random.Random) -> File:
        self._drop_files()
        if (linked := [file for file in self.files if file.linked]) and chance.random() < 0.3:
            return chance.choice(linked)
        return self.add(File, self._new_key(chance), chance)

    def _register(
        self,
        name: str,
        file: File,
        fronts: Sequence[FrontProcess | Owner],
        chance: random.Random,
        like: Call | None = None,
        wrong: str = "",
    ) -> None:
        pages = file.full_size // PAGE
        first = 0 if pages == 1 or chance.random() < 0.6 else chance.randrange(pages)
        size = (pages - first) * PAGE
        if chance.random() < 0.3:
            size = chance.randrange(1000, size + 1)
        offset = first * PAGE
        if like is not None and chance.random() < 0.8:
            offset, size = like.offset, like.byte_size
        call = self._new("register", name, fronts, chance)
        call.key, call.offset, call.byte_size = "" if file.sealed else file.key, offset, size
        call.files = [found] if (found := self._by_key(file.key)) is not None else [file]
        call.wrong = wrong
        self._send(call, chance)

    def register(
        self, name: str, file: File, owner: Owner, chance: random.Random, like: Call | None = None, wrong: str = ""
    ) -> None:
        """Has an owner hand over an object. ``wrong``: what is wrong with that, if something is."""
        self._register(name, file, [owner], chance, like, wrong)

    def call(self, kind: str, name: str, fronts: Sequence[FrontProcess | Owner], chance: random.Random) -> Call:
        call = self._new(kind, name, fronts, chance)
        self._send(call, chance)
        return call

    def _new(self, kind: str, name: str, fronts: Sequence[FrontProcess | Owner], chance: random.Random) -> Call:
        front = chance.choice(fronts)
        return Call(
            kind,
            name,
            next(self._numbers),
            self._scheduler.clock.now_ns,
            front,
            deaths=len(self._clients.history.deaths),
        )

    def _send(self, call: Call, chance: random.Random) -> None:
        for name in (call.model,) if call.model else (*self.names, *sorted(self._retired)):
            self._in_force.of(name).append(call)
        if call.goes and not call.model:
            self._alls.append(call)
        self.open[call] = None
        self._scheduler.tell(f"{call} at {call.front}{self._described(call)}")
        if isinstance(call.front, Owner):
            call.front.queue(call)
            return
        private = call.model == "" or chance.random() < (0.3 if self.owners.reclaim == "connection" else 0.8)
        call.connection = self._clients.network.route(call.front, private=private)
        call.connection.queue(call)

    @staticmethod
    def _described(call: Call) -> str:
        return f": {call.byte_size} bytes at {call.offset} of {call.files[-1]}" if call.kind == "register" else ""

    def _replace(self, call: Call, chance: random.Random) -> None:
        """Makes another object in the place of one, under its key."""
        if (there := self._by_key(call.key)) is not None:
            there.unlink(self._scheduler.clock.now_ns)
            self._scheduler.tell(f"{there} loses its name")
        file = self.add(File, call.key, chance)
        for each in self.open:
            if each.key == call.key:
                each.files.append(file)

    # ------------------------------------------------------------------------------------------- what connections report

    def ended(self, call: Call, error: str) -> None:
        """Judges the answer to a call."""
        self.owners.note_ends()
        now_ns = self._scheduler.clock.now_ns
        self.open.pop(call, None)
        # What a daemon has answered that has ended since was true until its end.
        call.error, call.ended_ns = error, call.gone_ns or now_ns
        self._scheduler.tell(f"{call} is answered: {error or self._said(call)}")
        self._clients.counts[f"{call.kind} of a region{' failed' * bool(error)}"] += 1
        if error:
            if not (self._clients.stopped_ns or self._why_failed(call, error)):
                self._scheduler.defect(f"{call} failed without a reason: {error}")
        elif call.kind == "status":
            self._judge_listed(call)
        elif call.wrong:
            self._scheduler.defect(f"{call} is answered well, and is wrong: {call.wrong}")
        elif call.kind == "register":
            if not call.gone_ns:
                self._in_force.renewed(call)
                if all(file.cannot_be(call.offset, call.byte_size, call.begun_ns) for file in call.files):
                    self._scheduler.defect(f"{call} is answered well, and its object has no name, or too few bytes")
            there = self._in_force.certain(call.model, call.begun_ns)
            others = [
                each
                for each in self._in_force.of(call.model)
                if each is not call and each.kind != "status" and each.may_last(call.begun_ns)
            ]
            if there is not None and not others and there.what != call.what:
                self._scheduler.defect(f"{call} is answered well, and {there} is another one")
        # Another error, such as that its front has stopped, says nothing of who uses a region.
        if call.kind == "status" and (not error or self._says_unknown(error)):
            for name in (call.model,) if call.model else (*self.names, *sorted(self._retired)):
                self._judge_quiet(call, name)
        if (
            call.kind == "unregister"
            and call.done
            and not call.gone_ns
            and call.model in self.names
            and self._scheduler.chance.random() < 0.7
        ):
            # Whoever wants the memory back asks whether somebody uses it.
            self._scheduler.clock.now_ns += 1
            fronts = [call.front] if not isinstance(call.front, Owner) else self._fronts()
            if fronts:
                self.call("status", call.model, fronts, self._scheduler.chance)
        self.check()

    @staticmethod
    def _said(call: Call) -> str:
        return f"{sorted(call.listed)}" if call.kind == "status" else "done"

    def _why_failed(self, call: Call, error: str) -> str:
        clients, since_ns = self._clients, call.begun_ns
        if call.gone_ns:
            return "the daemon has ended"
        if clients.history.lacked_for(error, since_ns):
            return "there was no descriptor"
        if call.kind == "status":
            return "it is not there" if self._says_unknown(error) and self._may_be_unlisted(call) else ""
        others = [
            each
            for each in self._in_force.of(call.model)
            if each is not call and each.kind != "status" and each.may_last(since_ns)
        ]
        if call.kind == "register":
            there = [each for each in self._in_force.candidates(call.model, since_ns) if each is not call]
            if _TAKEN in error and any(each.what != call.what or others for each in there):
                return "the name is taken"
            if call.wrong and call.wrong in error:
                return "it is wrong"
            if _NO_KEY in error and (self._by_key(call.key) is None or len(call.files) > 1 or not call.files[0].linked):
                return "its object has no name"
            if ("invalid args" in error or "bytes now" in error) and any(
                file.was_short(since_ns) or file.full_size < call.offset + call.byte_size for file in call.files
            ):
                return "its object is too short"
            if len(clients.history.deaths) != call.deaths or clients.daemon.children(WorkerProcess) == []:
                return "workers have died"
            if "is running" in error and clients.history.deaths:
                return "a worker has died"
        return "its front has stopped" if not call.front.serves else ""

    @staticmethod
    def _says_unknown(error: str) -> bool:
        return UNKNOWN in error.replace("system ", "")

    def _may_be_unlisted(self, call: Call) -> bool:
        return self._in_force.is_up(call.model, call.begun_ns) is None

    def _judge_listed(self, call: Call) -> None:
        """Judges what is said of regions: those that are there, as they were registered, and those that may be left."""
        since_ns, defect = call.begun_ns, self._scheduler.defect
        asked = (call.model,) if call.model else (*self.names, *sorted(self._retired))
        for name in asked:
            found, there = self._in_force.certain(name, since_ns), call.listed.get(name)
            if self._in_force.is_up(name, since_ns) is not None and there is None:
                defect(f"{call} does not list region '{name}', which is registered")
            if found is not None and there != (found.key, found.offset, found.byte_size):
                defect(f"{call} lists region '{name}' as {there}, and not as {found} has it")
            known = [each for each in self._in_force.of(name) if each.kind == "register"]
            if there is not None and there not in [(each.key, each.offset, each.byte_size) for each in known]:
                defect(f"{call} lists region '{name}' as {there}, as nobody has registered it")
            down = self._in_force.is_down(name, since_ns)
            if there is not None and down is not None and not self._may_be_used(name, down):
                defect(f"{call} lists region '{name}', which {down} has ended, and which no request can use")
        for name in call.listed:
            if name not in self._in_force:
                defect(f"{call} lists region '{name}', which nobody has registered")

    def _may_be_used(self, name: str, down: Call) -> bool:
        """Returns whether a request that was asked before a region was unregistered may use it, or may have used it then."""
        return not down.of_daemon and any(
            not use.closed_ns or use.doubtful or use.closed_ns >= down.begun_ns
            for use in self._known
            if use.ask.begun_ns < down.ended_ns and any(place.region == name for place in use.places)
        )

    def ran(self, ask: Ask) -> None:
        """Judges that a worker runs a request: that is not so where it was said of a region that nobody uses it any more."""
        for place in ask.use.places if ask.use is not None else ():
            quiet_ns = self._quiet_ns.get(place.region, 0)
            if ask.begun_ns < quiet_ns and self._in_force.is_down(place.region, quiet_ns):
                self._scheduler.defect(f"{ask} is run, and its region '{place.region}' was listed no more")

    def _judge_quiet(self, call: Call, name: str) -> None:
        """Notes that nobody uses a region any more, which was unregistered and is not listed."""
        now_ns = self._scheduler.clock.now_ns
        if name not in call.listed:
            self._in_force.conclude(name, now_ns, call.begun_ns)
        if name in call.listed or self._in_force.is_down(name, call.begun_ns) is None:
            return
        self._adopt_all(name)
        self._quiet_ns[name] = now_ns
        self._retired.discard(name)
        self._scheduler.tell(f"nobody uses region '{name}' any more")
        self._clients.counts["region is over"] += 1

    def _adopt_all(self, name: str) -> None:
        for use in self._uses.values():
            if any(place.region == name for place in use.outputs.values()):
                for file, at, size in self._ranges(use):
                    file.adopt(at, size)

    def lost(self, call: Call) -> None:
        """Notes that nobody knows what becomes of a call."""
        self.open.pop(call, None)
        call.lost = True

    def pending(self) -> list[Call]:
        """Returns the calls that have no answer yet."""
        return [call for call in self.open if call.front.alive]

    # --------------------------------------------------------------------------------------------------- another daemon

    def daemon_ended(self) -> None:
        """Notes that the daemon has ended, and that its processes are about to."""
        self._in_force.daemon_ended(self._scheduler.clock.now_ns)
        self.open.clear()

    def daemon_begins(self) -> None:
        """Notes that the next daemon begins, which knows no region, and that nobody is there who could write to one."""
        self.check()
        for use in list(self._uses.values()):
            for file, at, size in self._ranges(use):
                file.adopt(at, size)
            if use.closed_ns:
                del self._uses[use.ask.number]
        self._begun_ns = self._scheduler.clock.now_ns
        self._in_force.daemon_begins(self._begun_ns)
        self._known = [use for use in self._known if not use.closed_ns]
        self._retired.clear()
        self.check()

    def opened(self, front: FrontProcess) -> None:
        """Has clients that had regions at the daemon before ask a front with these, and register them again."""
        chance = random.Random(f"{front} {self._scheduler.clock.now_ns}")
        for name in self.names if self._begun_ns else ():
            if chance.random() < 0.3:
                self._clients.ask(front, chance.choice(ASKED), 1, places=chance)
            done = [call for call in self._in_force.of(name) if call.kind == "register" and call.done]
            if done and chance.random() < 0.4 and not any(call.model in (name, "") for call in self.open):
                self.register_again(name, done[-1], self.owners.living, chance)

    def register_again(self, name: str, call: Call, owners: list[Owner], chance: random.Random) -> None:
        """Has a client register a region as it was, over any front, or one of ``owners``, who have its memory."""
        file = call.files[-1]
        if clients := owners if file.sealed else self._fronts():
            self._register(name, file, clients, chance, call)

    def note_ends(self, has_ended: Callable[[Call], bool]) -> None:
        """Notes which regions go because those that registered them have ended, as ``has_ended`` says."""
        now_ns = self._scheduler.clock.now_ns
        for name in (*self.names, *sorted(self._retired)):
            for call in self._in_force.candidates(name, now_ns):
                if not (call.has_end or call.gone_ns) and has_ended(call):
                    self._scheduler.tell(f"region '{name}' goes with whom {call} was of")
                    self._in_force.note_end(name, call, now_ns)
                    self._clients.counts["region goes"] += 1

    def judge_rest(self) -> None:
        """Notes that everything has come to rest: regions are gone whose owners have ended."""
        self.owners.note_ends()
        now_ns = self._scheduler.clock.now_ns
        for name in (*self.names, *sorted(self._retired)):
            self._in_force.conclude(name, now_ns, now_ns - SECOND)
        self.owners.judge_watched()

    def _fronts(self) -> list[FrontProcess]:
        return [front for front in self._clients.daemon.children(FrontProcess) if front.serves]

    @property
    def supervisor(self) -> SupervisorProcess:
        return self._clients.daemon.supervisor

    @property
    def registry(self) -> RegionRegistry:
        return self.supervisor.supervisor._regions

    def lacked_for(self, message: str, since_ns: int) -> bool:
        """Returns whether an error since then may say that there was no descriptor."""
        return self._clients.history.lacked_for(message, since_ns)

    # ------------------------------------------------------------------------------------------------------------ the end

    def judge_end(self, workers: Iterable[WorkerProcess]) -> None:
        """Checks that nothing is left, once every region was unregistered and every request has its end."""
        self._uses.clear()
        for file in self.files:
            file.adopt(0, file.full_size)
        for worker in workers:
            table = worker.worker._regions if worker.worker is not None else None
            if table is not None and (table._regions or table.leaving or table._waiting):
                self._scheduler.defect(f"{worker} has something left: {table}, {table._waiting}")
        registry = self.registry
        if registry._all or registry._tasks:
            self._scheduler.defect(f"the supervisor has regions left: {registry._all}")

    def close(self) -> None:
        """Removes all objects."""
        self.owners.free()
        for file in self.files:
            file.unlink()
            os.close(file.fd)
        self.files.clear()


def mappings(prefix: str) -> list[str]:
    """Returns the mappings in this process of objects that have ``prefix`` in their names."""
    with open("/proc/self/maps") as maps:
        return [line.strip() for line in maps if PREFIX in line and prefix in line]
