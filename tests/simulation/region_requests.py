"""Objects in shared memory, and requests whose tensors lie in regions of them: what is read and written there, and where."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.owners import Owner, Owners
from tests.simulation.processes import FrontProcess
from tests.simulation.regions import PREFIX, SNAPSHOT, Call, File, Place, Registrations, Use, inputs_of, meet

if TYPE_CHECKING:
    from tests.simulation.clients import Ask, Clients

_NUMBERS = itertools.count()
#: So many requests leave room for others.
_MANY = 40
#: Objects that are looked at to the end.
_MOST_FILES = 10
UNKNOWN, _LOST, _SHORT = "Unable to find shared memory region", "lost its memory", "its object was truncated"
_SMALL, _OUTSIDE, _MISMATCH = "should be at least", "for shared memory region", "byte size mismatch"


class RegionRequests:
    """All regions' objects, and the requests whose tensors lie there."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._scheduler = clients.scheduler
        self._in_force = Registrations()
        self._numbers = itertools.count(1)
        #: The names that may be used, and all of which something may be left.
        self.names: list[str] = []
        self.files: list[File] = []
        #: The requests that may write to regions.
        self._uses: dict[int, Use] = {}
        self._known: list[Use] = []
        #: From when on nothing that was asked before can use a region of that name.
        self._quiet_ns: dict[str, int] = {}
        #: The names that are not registered any more.
        self._retired: set[str] = set()
        #: The calls that have no answer yet; and those that unregister all.
        self.open: dict[Call, None] = {}
        self._alls: list[Call] = []
        self.owners: Owners
        #: Since when the processes of the daemon before are dead; 0: there was none.
        self._begun_ns = 0
        #: The names of all shared-memory objects of the run contain this.
        self.prefix = f"{os.getpid():08}-{next(_NUMBERS):06}-"

    def _ranges(self, use: Use) -> Iterator[tuple[File, int, int]]:
        """Yields the ranges of objects that a request may write to: object, begin, size."""
        if use.ask.front.started_ns < self._begun_ns:
            return
        for place in use.outputs.values():
            since_ns = max(use.ask.begun_ns, self._quiet_ns.get(place.region, 0), self._begun_ns)
            for call in self._in_force.candidates(place.region, since_ns):
                size = min(place.byte_size, call.byte_size - place.offset)
                if size > 0:
                    for file in call.files:
                        yield file, call.offset + place.offset, size

    # ----------------------------------------------------------------------------------------------------------- objects

    def check(self) -> None:
        """Checks that no byte of an object has changed but where requests may write now."""
        written: list[tuple[File, int, int]] | None = None
        for file in self.files:
            content = file.read(0, file.full_size + 1)
            if len(content) != len(file.double):
                self._scheduler.defect(f"{file} has {len(content)} bytes, its clients have made it {len(file.double)}")
                return
            if content == file.double:
                continue
            if written is None:
                written = [each for use in self._uses.values() for each in self._ranges(use)]
            expected = bytearray(file.double)
            for which, at, size in written:
                if which is file:
                    expected[at : at + size] = content[at : at + size]
            if content != expected:
                at = next(at for at in range(len(content)) if content[at] != expected[at])
                self._scheduler.defect(f"byte {at} of {file} has changed, and no request may write there")
                return

    def add(self, kind: type[File], key: str, chance: random.Random) -> File:
        """Makes an object."""
        file = kind(next(self._numbers), key, chance.choice((1, 16, 16, 16)), chance)
        self.files.append(file)
        self._scheduler.tell(
            f"{file} of {len(file.double)} bytes is made{', not to be mapped' * key.startswith(SNAPSHOT)}"
            f"{', sealed' * file.sealed}"
        )
        return file

    def _new_key(self, chance: random.Random) -> str:
        return f"{chance.choice((PREFIX, PREFIX, SNAPSHOT))}{self.prefix}{next(self._numbers):06}"

    def _drop_files(self) -> None:
        """Gives up objects of which no region is left and to which nobody writes."""
        used = {file for name in self.names for call in self._in_force.of(name) for file in call.files}
        used |= {file for use in self._uses.values() for file, _, _ in self._ranges(use)}
        for file in [file for file in self.files if file not in used][:-_MOST_FILES]:
            self.files.remove(file)
            file.unlink()
            os.close(file.fd)

    def _resize(self, file: File, size: int) -> None:
        if size == len(file.double) or file.sealed:
            return
        self._scheduler.tell(f"{file} has {size} bytes from now on, {len(file.double)} before")
        for use in self._uses.values():
            for which, at, length in self._ranges(use):
                if which is file:
                    file.adopt(at, length)
        self.check()
        file.resize(size, self._scheduler.clock.now_ns)

    def _scribble(self, file: File, chance: random.Random) -> None:
        """Has a client write into its memory, also where a request uses it."""
        size = chance.choice((1, 100, 3000))
        for _ in range(chance.choice((1, 10))):
            at = chance.randrange(max(1, len(file.double) - size))
            met = [use for use in self._uses.values() if any(place.meets(file, at, size) for place in use.places)]
            if not met:
                break
        for use in met:
            use.disturbed = True
        file.write(at, chance.randbytes(size))

    # ---------------------------------------------------------------------------------------------------------- requests

    def may_ask(self, chance: random.Random) -> bool:
        """Returns whether somebody asks with tensors in regions: seldom, where nobody knows of any, or all of one are in use."""
        now_ns = self._scheduler.clock.now_ns
        if len(self._uses) > _MANY and chance.random() < 0.9:
            return False
        known = any(self._is_whole(name, now_ns) for name in self.names)
        return bool(self.names) and (known or chance.random() < 0.1)

    def _is_whole(self, name: str, now_ns: int) -> bool:
        """Returns whether it is known what a region is, and nothing of its object was missing since it was registered."""
        call = self._in_force.certain(name, now_ns)
        return call is not None and not any(file.is_short or file.cut_ns >= call.begun_ns for file in call.files)

    def place(self, ask: Ask, chance: random.Random) -> None:
        """Draws which tensors of a request lie in regions, and writes its inputs there."""
        use = Use(ask)
        inputs, outputs = inputs_of(ask.model), ask.outputs
        ask.size = min(ask.size, 5000)
        now_ns = self._scheduler.clock.now_ns
        up = [name for name in self.names if self._is_whole(name, now_ns)]
        if not up or chance.random() < 0.2:
            up = [name for name in self.names if self._in_force.certain(name, now_ns) is not None]
        known = up if up and chance.random() < 0.9 else self.names
        names = chance.sample(known, min(len(known), chance.choice((1, 1, 2))))
        if chance.random() < 0.03:
            names = [f"r{chance.randrange(1000, 2000)}"]
        wrong = chance.choice((_SMALL, _OUTSIDE, _MISMATCH)) if chance.random() < 0.06 else ""
        for tensors, places in ((inputs, use.inputs), (outputs, use.outputs)):
            for tensor in tensors:
                if chance.random() < 0.65 or not (use.places or tensor != outputs[-1]):
                    places[tensor] = self._draw(ask, use, chance.choice(names), chance)
        for place in use.inputs.values():
            if place.call is not None and place.offset + place.byte_size > place.call.byte_size:
                wrong = use.wrong = _OUTSIDE
            elif wrong == _MISMATCH:
                place.byte_size, use.wrong = ask.size * 8 - (1 if ask.size == 1 else 8), _MISMATCH
        for place in use.outputs.values():
            if place.call is not None and place.offset + place.byte_size > place.call.byte_size:
                wrong = use.wrong = _OUTSIDE
            elif place.call is not None and chance.random() < 0.3:
                # It need not be as large as it may be.
                place.byte_size = min(place.call.byte_size - place.offset, place.byte_size + chance.choice((1, 8, 100)))
            if wrong == _SMALL:
                place.byte_size, use.wrong = ask.size * 8 - 1, _SMALL
            elif wrong == _OUTSIDE and place.call is not None and not use.wrong:
                place.offset, use.wrong = place.call.byte_size - chance.choice((-8, 0, 1, ask.size * 8 - 1)), _OUTSIDE
        self._disturb(use)
        content = np.full(ask.size, ask.input, np.int64).tobytes()
        for place in use.inputs.values():
            if place.file is not None:
                place.file.write(place.call.offset + place.offset, content)  # type: ignore[union-attr]
        ask.use = self._uses[ask.number] = use
        self._known.append(use)
        self._spoil(chance.choice(use.places), ask.front, chance)

    def _draw(self, ask: Ask, use: Use, name: str, chance: random.Random) -> Place:
        call = self.last(name)
        if call is None:
            return Place(name, chance.choice((0, 64)), ask.size * 8, None)
        if ask.size * 8 > call.byte_size // chance.choice((3, 100, 100, 100)) and not use.places:
            # So that many have room beside each other.
            ask.size = chance.choice((1, 1, 8, 20))
        size, place = ask.size * 8, None
        for _ in range(20):
            room = max(0, call.byte_size - size)
            offset = chance.randrange(room // 8 + 1) * 8 if chance.random() < 0.8 else chance.randrange(room + 1)
            place = Place(name, offset, size, call)
            if chance.random() < 0.02 or not any(
                meet(place, other) for each in (*self._uses.values(), use) for other in each.places
            ):
                break
        assert place is not None
        return place

    def _spoil(self, place: Place, front: FrontProcess, chance: random.Random) -> None:
        """Has a client, at times, cut an object as it asks, or end a region, so that requests of all kinds meet that."""
        drawn = chance.random()
        if place.call is None or place.file is None or place.region not in self.names or self._clients.stopped_ns:
            return
        if drawn < 0.04:
            self._cut(place.file, chance)
        elif drawn < 0.08 and not any(call.model in (place.region, "") for call in self.open):
            self.call("unregister", place.region, [front], chance)

    def last(self, name: str) -> Call | None:
        """Returns the registration of a name that was asked for last, and was not refused."""
        calls = [call for call in self._in_force.of(name) if call.kind == "register" and not call.error]
        return calls[-1] if calls else None

    def registered(self, name: str) -> list[Call]:
        """Returns the registrations of a name that were answered well by the daemon of now, and whose clients were there then."""
        calls = self._in_force.of(name)
        return [call for call in calls if call.kind == "register" and call.done and not (call.gone_ns or call.has_end)]

    def _cut(self, file: File, chance: random.Random) -> None:
        self._resize(file, min(len(file.double), chance.choice((0, 0, file.full_size // 2))))

    def _disturb(self, use: Use) -> None:
        for other in self._uses.values():
            if any(meet(one, two) for one in use.places for two in other.places):
                use.disturbed = other.disturbed = True
        if any(meet(one, two) for one, two in itertools.combinations(use.outputs.values(), 2)):
            use.disturbed = True
        if any(meet(one, two) for one in use.inputs.values() for two in use.outputs.values()):
            use.disturbed = len(use.inputs) + len(use.outputs) > 2 or use.disturbed

    def is_sure(self, use: Use) -> bool:
        """Returns whether it is known what a request has read and where it has written."""
        since_ns = use.ask.begun_ns
        if use.disturbed:
            return False
        for place in use.places:
            call = self._in_force.certain(place.region, since_ns, use.ask.front)
            if call is None or call is not place.call or len(call.files) != 1 or call.files[0].was_short(since_ns):
                return False
        return True

    def read(self, ask: Ask, output: str) -> Any:
        """Returns an output that lies in a region, once the answer has come; without values where nobody knows them."""
        assert ask.use is not None
        place = ask.use.outputs.get(output)
        if place is None:
            self._scheduler.defect(f"{ask} got output '{output}' nowhere")
            return np.empty(0, np.int64)
        if place.file is None or place.call is None:
            return np.empty(0, np.int64)
        ask.use.read[output] = ask.size * 8
        content = place.file.read(place.call.offset + place.offset, ask.size * 8)
        return np.frombuffer(content[: len(content) // 8 * 8], np.int64)

    def judge(self, ask: Ask) -> bool:
        """Judges an answer that is no error as far as regions go. Returns whether its values can be judged."""
        use = ask.use
        assert use is not None
        for place in use.places:
            if self._in_force.is_down(place.region, ask.begun_ns) or not self._in_force.of(place.region):
                self._scheduler.defect(
                    f"{ask} is answered, and region '{place.region}' had been unregistered before it was asked"
                )
            call = self._in_force.certain(place.region, ask.begun_ns, ask.front)
            if call is None or call is not place.call or use.wrong:
                continue
            end = call.offset + place.offset + ask.size * 8
            if len(call.files) == 1 and call.files[0].has_lacked(end, ask.begun_ns):
                self._scheduler.defect(f"{ask} is answered, and {call.files[0]} lacked bytes all the time")
        if not self.is_sure(use):
            use.read.clear()
            self._clients.counts["in regions, unsure"] += 1
            return False
        if use.wrong:
            self._scheduler.defect(f"{ask} is answered, and its output has no room: {use.wrong}")
        if len(use.read) < len(use.outputs):
            self._scheduler.defect(f"{ask} got outputs in its answer that belong into regions")
        self._clients.counts["in regions"] += 1
        return True

    def excuse(self, ask: Ask, code: str, message: str) -> bool:
        """Returns whether an error of a request may come of its regions."""
        self.owners.note_ends()
        use, since_ns = ask.use, ask.begun_ns
        assert use is not None
        use.doubtful |= code == "DEADLINE_EXCEEDED"
        places = [place for place in use.places if f"'{place.region}'" in message]
        if use.wrong and use.wrong in message:
            return True
        for place in places:
            found = self._in_force.candidates(place.region, since_ns)
            cut = any(file.cut_ns >= call.begun_ns for call in found for file in call.files)
            if (
                UNKNOWN in message
                and code in ("", "NOT_FOUND")
                and (self._in_force.is_up(place.region, since_ns) is None or cut)
            ):
                return True
            if _LOST in message and cut:
                return True
            if _SHORT in message and any(file.was_short(since_ns) for call in found for file in call.files):
                return True
            known = self._in_force.certain(place.region, since_ns)
            if _OUTSIDE in message and (place.call is None or known is not place.call):
                return True
        return False

    def closed(self, ask: Ask, outcome: str) -> None:
        """Notes that a request has ended, for its client."""
        use = ask.use
        assert use is not None
        use.closed_ns = self._scheduler.clock.now_ns
        over = ask.front.started_ns < self._begun_ns
        if outcome in ("answered", "was not taken") or (outcome == "error" and not use.doubtful) or over:
            ranges = list(self._ranges(use))
            del self._uses[ask.number]
            if outcome == "answered" and use.read:
                for output, size in use.read.items():
                    place = use.outputs[output]
                    if place.file is not None and place.call is not None:
                        place.file.adopt(place.call.offset + place.offset, size)
            elif outcome != "was not taken":
                for file, at, size in ranges:
                    file.adopt(at, size)
            self.check()
            return
        use.doubtful = True

    def call(self, kind: str, name: str, fronts: Sequence[FrontProcess | Owner], chance: random.Random) -> Call:
        """Has a client ask something of a region, or of all."""
        raise NotImplementedError
