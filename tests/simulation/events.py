"""What happens to a simulated daemon, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

#: How often what happens, beside each other.
KINDS = {
    "ask": 60,
    "ask in regions": 60,
    "region": 25,
    "step": 25,
    "ask a caller": 25,
    "ask in rounds": 15,
    "ask a flow": 15,
    "ask for later": 15,
    "deadly ask": 0.5,
    "ask over a lane": 30,
    "full lanes": 0.15,
    "program": 0.6,
    "kill program": 0.4,
    "program leaves": 0.2,
    "cancel": 4,
    "read nothing": 2,
    "between responses": 8,
    "load": 5,
    "unload": 2,
    "push": 4,
    "deadly push": 0.4,
    "kill client": 0.4,
    "kill worker": 1.5,
    "kill worker in a run": 1,
    "kill worker sending": 1,
    "kill front": 0.4,
    "kill front sending": 0.2,
    "no workers": 0.15,
    "no memory": 0.15,
    "stop": 2,
    "go on": 4,
    "slow": 3,
    "jump": 0.5,
    "drain": 0.3,
    "end drain": 0.8,
    "descriptors run out": 0.6,
    "descriptors are back": 0.6,
    "kill supervisor": 0.4,
    "kill supervisor sending": 0.4,
    "kill supervisor starting": 0.3,
    "restart": 0.3,
}

#: The events by which the daemon ends. In half of the runs there are none of them; half of the others have none of ``REGIONS``.
ENDS = ("kill supervisor", "kill supervisor sending", "kill supervisor starting", "restart")

REGIONS = ("ask in regions", "region")
#: The events of clients that hand memory over, and of whom regions go with; and how often one comes behind another event.
OWNERS, _OWNED = ("owner", "owner", "end owner", "end owner"), 0.08
#: Events that kill workers and fronts. Half of the runs with regions have none of them, so that most requests are answered.
DEATHS = (
    "deadly ask",
    "deadly push",
    "kill worker",
    "kill worker in a run",
    "kill worker sending",
    "kill front",
    "kill front sending",
    "no workers",
    "no memory",
)
#: The events that may come between two responses of a request, besides those of its client.
TROUBLES = ("kill worker", "kill worker", "kill front", "kill client", "load", "unload", "push", "stop", "drain")


@dataclass(frozen=True)
class Event:
    """Something that happens to the daemon: after so many turns, of what kind, and a number from which the rest is drawn."""

    gap: int
    kind: str
    number: int

    def __repr__(self) -> str:
        return f"{self.gap}:{self.kind}:{self.number}"


def ends(seed: int) -> bool:
    """Returns whether the daemon of a seed may die as a whole, and be started again."""
    return random.Random(f"ends {seed}").random() < 0.5


def has_regions(seed: int) -> bool:
    """Returns whether clients have regions."""
    return not ends(seed) or random.Random(f"regions {seed}").random() < 0.5


def has_owners(seed: int) -> bool:
    """Returns whether clients hand over memory, and regions may go with whom they belong to."""
    return has_regions(seed) and random.Random(f"owners {seed}").random() < 0.4


def reclaim(seed: int) -> Literal["never", "owner", "connection"]:
    """Returns with whom regions go."""
    drawn: Literal["never", "owner", "connection"] = random.Random(f"reclaim {seed}").choice(
        ("never", "owner", "connection")
    )
    return drawn if has_owners(seed) else "never"


def plan(seed: int) -> Iterator[Event]:
    """Yields the events that a seed stands for, without end."""
    chance = random.Random(f"plan {seed}")
    # Some runs are calm, and some have one kind of trouble only.
    kinds = {kind: weight * chance.choice((0, 0.3, 1, 1, 3)) for kind, weight in KINDS.items()}
    kinds |= dict.fromkeys((*(() if has_regions(seed) else REGIONS), *(() if ends(seed) else ENDS)), 0)
    if not ends(seed) and chance.random() < 0.5:
        kinds |= dict.fromkeys(DEATHS, 0)
    kinds["ask"], kinds["load"] = max(kinds["ask"], 10), max(kinds["load"], 0.5)
    if chance.random() < 0.3:
        kinds["unload"] = 0
    mean = chance.choice((3, 10, 30))
    own = random.Random(f"events of owners {seed}") if has_owners(seed) else None
    while True:
        (kind,) = chance.choices(list(kinds), list(kinds.values()))
        yield Event(int(chance.expovariate(1 / mean)), kind, chance.randrange(1 << 30))
        if own is not None and own.random() < _OWNED:
            yield Event(int(own.expovariate(1 / mean)), own.choice(OWNERS), own.randrange(1 << 30))
