"""Tells objects that belong to one process that this process was forked off: no other thread runs here, and locks may be held."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Owned(Protocol):
    """Belongs to one process: connections, and whatever has requests of them in flight."""

    def forget(self) -> None:
        """Begins anew in a process that was forked off: nothing of the parent's requests is sent, ended or called back there."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def forgotten_by_children(owned: Owned) -> None:
    """Has ``owned.forget`` called in each process that is forked off this one, for as long as anybody refers to ``owned``."""
    _owned.add(owned)


def _forked() -> None:
    for each in list(_owned):
        each.forget()


os.register_at_fork(after_in_child=_forked)
