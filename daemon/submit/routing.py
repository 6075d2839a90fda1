"""Which worker holds a sequence. Pure: every front finds the same one, without asking anybody.

    a sequence and each device ─▶ a rank (digest of both) ─▶ the device with the highest one holds it

A worker that comes or goes changes the home of those sequences alone that it holds or held. The worker that replaces a dead one
has its device, and so its sequences: it knows nothing of them, and says so to whoever goes on with one.
"""

from __future__ import annotations

from collections.abc import Iterable

from shm import rendezvous
from shm.messages import SequenceId


def home(model: str, version: int, sequence: SequenceId, devices: Iterable[str]) -> str:
    """The device, of at least one. A number and the string of its digits are two sequences."""
    return rendezvous.choose((model, version, sequence), devices)
