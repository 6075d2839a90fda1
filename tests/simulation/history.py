"""What clients have changed and been told, and what may be in force at a moment because of it."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation import ensembles

#: What the daemon tells a client of a process that may open no more files, and how the system says it.
#: A worker that has none for a lane ends it, and the client knows no more.
_NONE_LEFT = re.compile(f"open as it may|could not open another lane|{os.strerror(errno.EMFILE)}")


@dataclass(eq=False)
class Change:
    """A client's load, unload or push of a model."""

    kind: str
    model: str
    number: int
    begun_ns: int
    #: Who was asked, a front, or who asks over the clients' socket, a program; None before there were any.
    front: Any
    #: None: its client never got an answer. "": it was done.
    error: str | None = None
    #: 0: it may go on.
    ended_ns: int = 0
    #: Its connection was cut: nobody knows what became of it.
    lost: bool = False
    #: When all of it had left for the front; 0: it has not, or it went another way.
    sent_ns: int = 0
    #: The workers that had died before.
    deaths: int = 0
    #: A push that workers die of, and when the first has.
    deadly: bool = False
    killed_ns: int = 0
    #: A push that sequences which have begun go on with.
    moves: bool = False
    #: A load of a daemon that is started.
    starts: bool = False
    #: A program asks the supervisor for it.
    by_program: bool = False
    #: When the daemon has ended that it was made in; 0: it has not, or nobody knows in which one it was made.
    gone_ns: int = 0

    @property
    def done(self) -> bool:
        return self.error == ""

    def is_gone(self, moment_ns: int) -> bool:
        """Returns whether the daemon that it was made in had ended at that moment."""
        return 0 < self.gone_ns <= moment_ns

    def ended_before(self, moment_ns: int) -> bool:
        return self.done and self.ended_ns < moment_ns

    def may_last(self, since_ns: int) -> bool:
        """Returns whether it may have been under way at some time since then."""
        return not self.ended_ns or self.ended_ns >= since_ns

    def __str__(self) -> str:
        return f"{self.kind} {self.number} of '{self.model}'"


class History:
    """The changes of every model, and the moments of trouble."""

    def __init__(self, models: Sequence[str]) -> None:
        self.changes: dict[str, list[Change]] = {model: [] for model in models}
        #: How often the files of a model have been written.
        self.files: Counter[str] = Counter()
        #: When workers have died.
        self.deaths: list[int] = []
        #: When each has died by itself, and when the daemon has with all of its workers.
        self.ends: list[int] = []
        #: When the supervisor has told fronts of each of them.
        self.fences: list[int] = []
        #: When somebody has last been stopped, or time has jumped.
        self.trouble_ns = 0
        #: The models that are not served because workers have died of what was pushed into them.
        self.blamed: set[str] = set()
        #: Models that are not served for a while because workers have died loading them. When they were loaded again; 0: not yet.
        self.given_up: dict[str, int] = {}
        #: Somebody lacks descriptors; and when they were back.
        self.lacking = False
        self.lacked_ns = 0
        #: A drain has begun at some time, and fronts may refuse requests until they are told of its end.
        self.drained = False
        #: When the last one has ended, or was given up; 0: it is under way.
        self.drained_ns = 0
        #: When a daemon has last ended; 0: none has.
        self.ended_ns = 0
        #: True if the daemon that ended last was drained when it ended, or might have been, and so refused requests.
        self.ended_drained = False

    def pending(self) -> list[Change]:
        """Returns the changes whose client still waits for an answer."""
        changes = (change for each in self.changes.values() for change in each)
        return [change for change in changes if change.error is None and change.front.alive and not change.lost]

    def conclude(self, now_ns: int) -> None:
        """Notes that the supervisor does nothing any more for clients whose front has died."""
        for change in (change for each in self.changes.values() for change in each):
            if change.error is None and not change.front.alive:
                change.ended_ns = change.ended_ns or now_ns

    def daemon_ended(self, now_ns: int) -> None:
        """Notes that the daemon has ended, and everything with it that its fronts were asked and that was told a client."""
        self.ended_ns, self.ended_drained = now_ns, self.drained
        self.drained, self.drained_ns = False, now_ns
        for change in (change for each in self.changes.values() for change in each):
            if change.error is None and change.by_program:
                continue  # the next one may be asked
            change.gone_ns = change.gone_ns or now_ns
            change.ended_ns = change.ended_ns or now_ns

    def daemon_begins(self, now_ns: int) -> None:
        """Notes that the next daemon begins, which knows nothing of the workers before."""
        self.fences += [now_ns] * (len(self.deaths) - len(self.fences))
        self.blamed.clear()
        self.given_up.clear()

    def heard(self, model: str, text: str, now_ns: int) -> None:
        """Notes what is logged of a model."""
        if "died of it" in text:
            self.blamed.add(model)
        if "is given up for now" in text:
            self.given_up[model] = 0
        elif model in self.given_up and text.endswith(" is loaded"):
            self.given_up[model] = now_ns

    def was_given_up(self, model: str, since_ns: int) -> bool:
        """Returns whether a model was not served at some time since then, because workers had died loading it."""
        return model in self.given_up and not 0 < self.given_up[model] < since_ns

    def was_drained(self, since_ns: int) -> bool:
        """Returns whether a request that was begun then may be refused because of a drain."""
        return self.drained or (self.ended_drained and since_ns <= self.ended_ns)

    def lacked(self, since_ns: int) -> bool:
        """Returns whether somebody may have lacked descriptors at some time since then."""
        return self.lacking or self.lacked_ns >= since_ns

    def lacked_for(self, message: str, since_ns: int) -> bool:
        """Returns whether an error since then may say that there was no descriptor."""
        return self.lacked(since_ns) and bool(_NONE_LEFT.search(message))

    def least_files(self, model: str, moment_ns: int) -> int:
        """Returns the oldest files of a model whose answer somebody may get who asks at that moment."""
        loads = (each for each in self.changes[model] if each.kind == "load" and each.ended_before(moment_ns))
        return max((each.number for each in loads), default=0)

    def is_down(self, model: str, moment_ns: int) -> bool:
        """Returns whether an unload had been answered before that moment, and no load can have been under way since."""
        unloads = [each for each in self.changes[model] if each.kind == "unload" and each.ended_before(moment_ns)]
        if not unloads:
            return False
        last = max(unloads, key=lambda each: each.begun_ns)
        # The load of an ensemble loads its models as well.
        names = (model, *(name for name, steps in ensembles.ALL.items() if model in steps))
        loads = [each for name in names for each in self.changes.get(name, ()) if each.kind == "load"]
        return not any(each.may_last(last.begun_ns) for each in loads)

    def is_up(self, model: str, moment_ns: int) -> bool:
        """Returns whether a load had been answered before that moment, and no unload can have been under way since it began."""
        loads = [each for each in self.changes[model] if each.kind == "load" and each.ended_before(moment_ns)]
        if not loads:
            return False
        last = max(loads, key=lambda each: each.begun_ns)
        return not any(
            (each.kind == "unload" or (each.kind == "load" and not each.done))
            and each is not last
            and each.may_last(last.begun_ns)
            for each in self.changes[model]
        )

    def is_coming(self, model: str, moment_ns: int) -> bool:
        """Returns whether the daemon that began before that moment loads the model, or has, and nobody has unloaded it."""
        last = next((each for each in reversed(self.changes[model]) if each.starts), None)
        if last is None or last.error or moment_ns < last.begun_ns:
            return False
        return not any(each.kind == "unload" and each.may_last(last.begun_ns) for each in self.changes[model])

    def why_not_push(self, model: str, number: int, moment_ns: int) -> str:
        """Returns why push ``number`` (0: the files' own parameters) was not in force since that moment; "": it may have been."""
        changes = self.changes[model]
        before = [each for each in changes if each.kind != "unload" and each.ended_before(moment_ns)]
        if number == 0:
            pushes = [each for each in before if each.kind == "push" and not each.is_gone(moment_ns)]
            last = max(pushes, key=lambda each: each.begun_ns, default=None)
            # The load of an ensemble brings its models again, if they are not there.
            users = (name for name, models in ensembles.ALL.items() if model in models)
            loads = [*changes, *(each for name in users for each in self.changes.get(name, ()))]
            if last is None or any(each.kind == "load" and each.may_last(last.begun_ns) for each in loads):
                return ""
            return f"{last} had been answered before it was asked"
        found = next((each for each in changes if each.kind == "push" and each.number == number), None)
        if found is None:
            return "there was no such push"
        if found.is_gone(moment_ns):
            return f"{found} was of a daemon that had ended before it was asked"
        if found.error:
            return f"{found} had failed: {found.error}"
        if found.error is None:
            return ""
        later = next((each for each in before if each.begun_ns > found.ended_ns), None)
        return "" if later is None else f"{later} had been answered before it was asked"

    def why_failed(self, change: Change) -> str:
        """Returns what may have made a change fail; "": nothing."""
        others = [each for each in self.changes[change.model] if each is not change and each.may_last(change.begun_ns)]
        if others:
            return f"{others[0]} was under way"
        if self.ended_ns >= change.begun_ns:
            return "the daemon has ended"
        if change.kind == "push" and not self.is_up(change.model, change.begun_ns):
            return "the model was not loaded"
        if self.lacked_for(str(change.error), change.begun_ns):
            return "there was no descriptor"
        if any(said in str(change.error) for said in ("cannot be served now", "died of it")) and len(self.deaths) >= 2:
            return "workers had died"
        if "one is being replaced" in str(change.error) and self.deaths:
            return "a worker had died"
        if len(self.deaths) != change.deaths:
            return "a worker has died"
        return "" if change.front.serves else "its front has stopped"
