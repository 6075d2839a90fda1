"""Restores process-wide state that a model's code has changed, and logs changes.

When the load of a model begins or ends, puts back lost entries of ``sys.path``, settings of Python such as the recursion limit,
and those settings of JAX that hold for the whole process because JAX has no context manager for them (``own_flags``). Also
removes new filters that turn warnings into errors. After each run of a model's code, does the same except for the settings of
Python, unless a model is being loaded.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tensord.workers.imports.own_flags import WholeProcess, context_of

_log = logging.getLogger(__name__)
#: Settings that have a function to read and one to write them.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gc.isenabled()": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "logging.disable": (lambda: logging.root.manager.disable, logging.disable),
    "socket.getdefaulttimeout()": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "sys.getrecursionlimit()": (sys.getrecursionlimit, sys.setrecursionlimit),
    "sys.getswitchinterval()": (sys.getswitchinterval, sys.setswitchinterval),
}


class ProcessState:
    """Restores settings of the worker's Python process, such as its recursion limit, after a model's code has changed them."""

    def __init__(self) -> None:
        self._known = False
        self._lock = threading.Lock()
        #: Names of the models that are being loaded now.
        self._loading: list[str] = []

    @contextlib.contextmanager
    def kept(self, who: str) -> Iterator[None]:
        """Restores process-wide settings when the ``with`` block begins and again when the block ends.

        The settings get the values that they had at the first call. If they were changed in the block, the log blames the model
        ``who``.
        """
        with self._lock:
            if self._known:
                self._put_back(" or ".join((*self._loading, "a model's code, at a request or in a thread of its own,")))
            else:
                self._look()
            self._loading.append(who)
        try:
            yield
        finally:
            with self._lock:
                self._put_back(" or ".join(self._loading))
                self._loading.remove(who)

    def watch(self, who: str) -> Callable[[], None]:
        """Returns a function that must be called after each run of a model's code. ``who`` names this model in the log.

        The function gives process-wide settings of JAX the values of the first call of ``kept``, puts back lost entries of
        ``sys.path``, and removes new filters that turn warnings into errors. It logs only the first change. While a model is
        being loaded, the function does nothing.
        """
        logged = False

        def ran() -> None:
            nonlocal logged
            if (
                WholeProcess.updates == self._updates
                and sys.path == self._known_path
                # Where it is another list somebody is in ``warnings.catch_warnings``, in whatever thread.
                and (warnings.filters == self._known_filters or warnings.filters is not self._filters)
            ):
                return
            if (changed := self._restore()) and not logged:
                logged = True
                _warn(f"{who} or one that ran beside it, at a request,", changed)

        return ran

    def _restore(self) -> list[str]:
        with self._lock:
            if self._loading:
                return []  # a model that is being loaded may have, which is looked at when it is
            changed = [*self._put_back_flags(), *self._put_back_warnings(), *self._put_back_path()]
            self._accept()
            return changed

    def _look(self) -> None:
        self._known = True
        self._flags = {name: value for name, value in jax.config.values.items() if context_of(name) is None}
        self._settings = {name: ask() for name, (ask, _) in _SETTINGS.items()}
        self._errors = [entry for entry in warnings.filters if entry[0] == "error"]
        self._path = list(sys.path)
        self._filters = warnings.filters
        self._accept()

    def _accept(self) -> None:
        self._updates = WholeProcess.updates
        self._known_filters = list(warnings.filters)
        self._known_path = list(sys.path)

    def _put_back(self, who: str) -> None:
        changed = [*self._put_back_flags(), *self._put_back_settings(), *self._put_back_warnings()]
        changed += self._put_back_path()
        self._accept()
        if changed:
            _warn(who, changed)

    def _put_back_flags(self) -> Iterator[str]:
        now = jax.config.values
        for name, value in self._flags.items():
            if (found := now.get(name, value)) is value or found == value:
                continue
            try:
                jax.config.update(name, value)
                yield f"{name} was {found!r} instead of {value!r}"
            except Exception as error:  # JAX takes some only before its first computation
                self._flags[name] = found
                yield f"{name} is {found!r} now and cannot be {value!r} again ({error})"

    def _put_back_settings(self) -> Iterator[str]:
        for name, (ask, tell) in _SETTINGS.items():
            if (found := ask()) != (value := self._settings[name]):
                tell(value)
                yield f"{name} was {found!r} instead of {value!r}"

    def _put_back_warnings(self) -> Iterator[str]:
        # Other new filters stay: they make no code fail.
        raising = [entry for entry in warnings.filters if entry[0] == "error" and entry not in self._errors]
        if not raising:
            return
        kept = [entry for entry in warnings.filters if entry not in raising]
        # This also tells every module that what it knows of its warnings is no longer so.
        warnings.resetwarnings()
        warnings.filters[:] = kept  # type: ignore[index]
        yield f"warnings were errors ({', '.join(sorted(str(entry[2]) for entry in raising))})"

    def _put_back_path(self) -> Iterator[str]:
        gone = [entry for entry in self._path if entry not in sys.path]
        if gone:
            sys.path[:] = [*(entry for entry in sys.path if entry not in self._path), *self._path]
            yield f"sys.path lacked {', '.join(map(repr, gone))}"


def _warn(who: str, changed: list[str]) -> None:
    _log.warning("%s changed what all models of this process share; it is put back: %s", who, "; ".join(changed))
