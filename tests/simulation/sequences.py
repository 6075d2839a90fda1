"""Clients that send steps of sequences, and what each step may be answered.

A step may be sent while others of its sequence are in flight, over the same connection then. Where one fails, what was lost is
begun anew; now and then its client asks once more before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.history import History
from tests.simulation.scheduler import SECOND

MODEL = "s"
#: ``y`` of a step: x, x of its START, how many steps have run, the files, the push.
SOURCE = """
import numpy as np

host = True

def create(path, config, device):
    states = {{}}

    def apply(params, inputs):
        rows = []
        for x, start, who in zip(*(inputs[name][:, 0].tolist() for name in ("x", "START", "CORRID"))):
            first, steps = (x, 0) if start else states.get(who, (0, 0))
            states[who] = first, steps + 1
            rows.append([x, first, steps + 1, {files}, int(params["k"])])
        return {{"y": np.array(rows, np.int64)}}
    return apply, {{"k": np.int32(0)}}
"""
CONFIG = """
max_batch_size: 4
input { name: "x" data_type: TYPE_INT64 dims: 1 }
output { name: "y" data_type: TYPE_INT64 dims: 5 }
sequence_batching {
  max_sequence_idle_microseconds: 100000000
  oldest { max_candidate_sequences: 3 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START bool_false_true: [ false, true ] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""
#: There are more clients than slots, so some sequences wait.
_IDS = 6
_IDLE_NS = 100 * SECOND
_LOST, _NO_START = "was lost when its worker died", "must specify the START flag"
_MISSED = "before this one did not run"


@dataclass(eq=False)
class Run:
    """A sequence from a START on."""

    #: Its correlation id.
    number: int
    #: The number of the ask that began it.
    start: int
    begun_ns: int
    answered: int = 0
    #: When a worker last began to run a step of it.
    ran_ns: int = 0
    #: Steps behind the START of which nobody knows whether they ran: their connection or their front has gone.
    unsure: int = 0
    #: Nobody knows whether its START ran: steps that were sent behind the START may belong to the run before.
    doubted: bool = False
    #: The files and the push of its last answer.
    files: int = -1
    push: int = -1
    #: It need not be there any more.
    broken: bool = False
    #: The run that its client had under the same id before.
    before: Run | None = None
    #: Its START has failed, or was not taken: steps that were sent behind the START belong to the run before.
    refused: bool = False
    #: Its END has run: no step belongs to it any more.
    ended: bool = False
    #: A client was told that it is lost.
    lost: bool = False
    #: The next step is a START.
    over: bool = False
    #: How many steps were drawn, and how many of them have failed.
    drawn: int = 0
    failed: int = 0
    #: Steps were sent in calls of their own, whose answers may overtake each other.
    overtakes: bool = False
    #: A step went before its front had read it: nothing behind it is sent.
    cut: bool = False

    @property
    def chain(self) -> list[Run]:
        """The runs, from this one back, to which a step that was sent behind the START of this one may belong."""
        chain = [self]
        while (run := chain[-1]).before is not None and (run.refused or run.doubted) and not run.before.ended:
            chain.append(run.before)
        return chain


@dataclass(eq=False)
class Sequence:
    """A client that has one sequence after the other."""

    #: The correlation id of the next one.
    number: int
    run: Run | None = None
    in_flight: int = 0
    #: The connection over which was asked last; and the one before it, whose other steps are asked again when it closes.
    route: Any = None
    former: Any = None
    #: A step was cancelled, which overtakes nothing on that connection: the number of the ask that had begun the newest run then,
    #: else 0. Runs up to that one may be cancelled with it: they are one as long as they wait.
    cancelled: int = 0
    #: The newest step was an END, behind which a START of the same id is another sequence: it may run before the END, and the
    #: model keeps both by their id.
    ends: bool = False


@dataclass(eq=False)
class Step:
    """What an ask of a sequence says besides."""

    sequence: Sequence
    run: Run
    start: bool
    end: bool
    #: How many steps of its run were drawn with it.
    index: int = 0


class Sequences:
    """The clients of all sequences."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._all = [Sequence(number + 1) for number in range(_IDS)]

    def next(
        self, route: Callable[[], Any], number: int, now_ns: int, chance: random.Random
    ) -> tuple[Any, Step] | None:
        """Draws a step and a connection for it. Returns None if the client has to wait for what is in flight.

        ``route``: returns any connection.
        """
        sequence = chance.choice(self._all)
        usable = sequence.route is not None and sequence.route.usable
        moves = sequence.former is not None and not sequence.former.closed
        if sequence.in_flight and (sequence.ends or not usable or moves):
            return None
        if sequence.cancelled and not usable:
            self._renumber(sequence)
        if not (sequence.in_flight or sequence.cancelled):
            sequence.route = route()
        run = sequence.run
        start = run is None or (run.over and not (run.lost and chance.random() < 0.5)) or chance.random() < 0.03
        if run is None or start:
            run = sequence.run = Run(sequence.number, number, now_ns, before=run)
        return sequence.route, self._begun(sequence, run, start, chance.random() < 0.1)

    def _begun(self, sequence: Sequence, run: Run, start: bool, end: bool) -> Step:
        """Returns a step of a sequence, which is in flight from now on."""
        run.drawn += 1
        run.over |= end
        sequence.in_flight, sequence.ends = sequence.in_flight + 1, end
        return Step(sequence, run, start, end, run.drawn)

    def _renumber(self, sequence: Sequence) -> None:
        """Gives the client's next sequence another id, because nobody knows what still comes of this one."""
        sequence.number += _IDS
        sequence.cancelled, sequence.run = 0, None

    def closed(self, step: Step, outcome: str) -> None:
        """Notes that a step has its end."""
        step.sequence.in_flight -= 1
        if outcome in ("answered", "error"):
            return
        step.run.unsure += not step.start
        step.run.refused |= step.start and outcome == "was not taken"
        step.run.doubted |= step.start and outcome != "was not taken"
        step.run.broken = step.run.over = True
        if outcome == "cancelled":
            newest = step.sequence.run or step.run
            step.sequence.cancelled = newest.start
            newest.broken = newest.over = True
        elif step.sequence.run is not None and step.sequence.run.number == step.run.number:
            self._renumber(step.sequence)

    def last(self, route: Callable[[], Any]) -> tuple[Any, Step] | None:
        """Returns an END of a sequence of which nothing is in flight; None: there is no such sequence."""
        for sequence in self._all:
            if sequence.run is not None and not (sequence.run.over or sequence.in_flight):
                sequence.route = route()
                return sequence.route, self._begun(sequence, sequence.run, start=False, end=True)
        return None

    def why_not(self, step: Step, begun_ns: int, now_ns: int, values: list[int]) -> str:
        """Returns what is wrong with an answer that is not an error; "": nothing."""
        _, first, steps, files, push = values
        chain = step.run.chain
        able = [each for each in chain if not each.refused]
        run = next((each for each in able if each.start == first), None)
        if run is None:
            wanted = " or ".join(f"START {each.start}" for each in able)
            return f"it has the state of START {first} in place of {wanted or 'an error'}"
        overtakes = run.overtakes or step.run.overtakes
        if run.lost and not overtakes:
            return "its client was told that the sequence is lost"
        # That its START has run is known now.
        run.answered += 1 + run.doubted
        run.doubted = False
        run.ended |= step.end and not overtakes
        least = run.answered
        most = least + sum(each.unsure for each in chain[: chain.index(run) + 1])
        if overtakes:
            least, most = step.index - run.unsure - run.failed, step.index
            if run is not step.run:
                least, most = 1, run.drawn + most
        if not least <= steps <= most:
            return f"it is step {steps}, and {run.answered} were answered"
        if run.files >= 0 and files != run.files:
            return f"it is of load {files}, and its sequence began with load {run.files}"
        why = ""
        if run.push < 0:
            why = self._history.why_not_push(MODEL, push, begun_ns)
        elif not overtakes:
            why = self._why_not_moved(run, push, begun_ns)
        run.files, run.push = files, push
        if step.start and run.start > step.sequence.cancelled:
            step.sequence.cancelled = 0
        return f"it is of push {push}: {why}" if why else ""

    def _why_not_moved(self, run: Run, push: int, begun_ns: int) -> str:
        """Returns why a step after the first may not have run with that push."""
        moving = [each for each in self._history.changes[MODEL] if each.moves and each.may_last(run.begun_ns)]
        if push != run.push and not any(each.number == push and not each.error for each in moving):
            return f"the sequence had push {run.push}, and nothing moved it"
        changes = self._history.changes[MODEL]
        if any(each.kind == "load" and each.may_last(run.begun_ns) for each in changes):
            return ""  # pushes are of the load, and leave a sequence alone that began on another one
        found = next((each for each in changes if each.kind == "push" and each.number == push), None)
        since_ns = max(run.begun_ns, 0 if found is None else found.ended_ns or found.begun_ns)
        missed = next((each for each in moving if each.begun_ns > since_ns and each.ended_before(begun_ns)), None)
        return "" if missed is None else f"{missed} had moved it before it was asked"

    def excuse(self, step: Step, now_ns: int, code: str, message: str) -> str:
        """Notes that a step has failed. Returns what it may have failed of, because it is a step; "": nothing."""
        run, history = step.run, self._history
        run.failed += 1
        # A client may begin it anew on a dead worker, until the supervisor knows.
        died = len(history.deaths) > len(history.fences) or history.fences[-1:] > [run.begun_ns]
        broken = run.broken or step.sequence.cancelled > 0
        was_lost, had_none = _LOST in message, _NO_START in message
        unloaded = any(each.kind == "unload" and each.may_last(run.begun_ns) for each in history.changes[MODEL])
        excuse = ""
        if was_lost:
            excuse = "a worker has died" if died else "it had not begun" if broken else ""
        elif had_none and (broken or run.lost or died or unloaded):
            excuse = "its sequence was broken off"
        elif had_none and now_ns - run.ran_ns > _IDLE_NS * 0.9:
            excuse = "it was silent too long"
        elif (code == "CANCELLED" or _MISSED in message) and broken:  # an answer in a stream has no code
            excuse = "a step of its sequence was cancelled"
        elif _MISSED in message and run.failed > 1:
            excuse = "a step before it has failed"
        run.refused |= step.start
        for each in run.chain if was_lost else ():
            each.lost = True
        run.over |= was_lost or had_none or step.start
        run.broken |= step.start or step.end
        return excuse
