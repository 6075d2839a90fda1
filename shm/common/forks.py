"""Resets objects in a child process after a fork, such as connections that only the parent process may use."""

from __future__ import annotations

import os
import weakref
from typing import Any

_owned: weakref.WeakSet[Any] = weakref.WeakSet()


def forgotten_by_children(owned: Any) -> None:
    """Makes each process that is forked off this one call ``owned.forget``. ``owned`` may still be garbage-collected.

    ``forget`` removes the parent process's requests from an object, such as a connection.
    """
    _owned.add(owned)


def _forked() -> None:
    for each in list(_owned):
        each.forget()


os.register_at_fork(after_in_child=_forked)
