"""Resets objects in a child process after a fork, such as connections that only the parent process may use."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Owned(Protocol):
    """An object, such as a connection, that must be reset in a child process after a fork."""

    def forget(self) -> None:
        """Removes the parent process's requests from this object. It is called in a child process after a fork."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def forgotten_by_children(owned: Owned) -> None:
    """Makes each process that is forked off this one call ``owned.forget``. ``owned`` may still be garbage-collected."""
    _owned.add(owned)


def _forked() -> None:
    for each in list(_owned):
        each.forget()


os.register_at_fork(after_in_child=_forked)
